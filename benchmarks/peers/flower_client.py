"""A client of Flower: the network and the rows stay in the actor's process, weights come and go with each message."""

import os

import work
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

FOLDER = os.environ["PEERS_WORK"]
app = ClientApp()
_work = work.read_work(FOLDER)
_module = work.LeNet()


@app.train()
def train(message: Message, context: Context) -> Message:
    _module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client, round_id = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
    loss = work.local_update(FOLDER, _work, _module, client, round_id)
    metrics = MetricRecord({"num-examples": _work.rows, "loss": loss})
    content = RecordDict({"arrays": ArrayRecord(_module.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
