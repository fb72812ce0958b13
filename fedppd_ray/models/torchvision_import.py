"""Import torchvision beside a CPU build of torch.

torchvision's wheel on PyPI is built for CUDA. Beside a CPU build of torch its compiled operators do not load
and its import dies, because it registers shapes for `torchvision::nms` and `torchvision::qnms`, which then do
not exist. Data sets, transforms and ResNets need neither. Declaring the two operators, only where the plain
import failed, makes everything else work.
"""

import sys
from types import ModuleType

import torch

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[torch.library.Library] = []  # a Library unregisters its operators when it is collected


def import_torchvision() -> ModuleType:
    """torchvision, whatever the build of torch."""
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        _forget_half_imported()
        library = torch.library.Library("torchvision", "DEF")
        library.define(f"nms{_NMS}")
        library.define(f"qnms{_NMS}")
        _declared.append(library)
        import torchvision
    module: ModuleType = torchvision
    return module


def _forget_half_imported() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
