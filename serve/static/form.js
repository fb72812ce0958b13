// A form for one row of a table, made from the model card: a field per column, with what training saw of it.

const $ = (id) => document.getElementById(id);
const WAIT = 200;           // milliseconds after the last key

export function makeForm(columns, ask) {
  const fields = columns.map((column) => makeField(column));
  $("fields").replaceChildren(...fields.map((field) => field.box));
  $("columns").hidden = false;
  const send = () => {
    fields.forEach((field) => field.check());
    ask(Object.fromEntries(fields.map((field) => [field.column.name, field.value()])));
  };
  let waiting = 0;
  $("fields").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(send, WAIT);
  });
  $("columns").addEventListener("submit", (event) => {
    event.preventDefault();
    clearTimeout(waiting);
    send();
  });
  $("averages").addEventListener("click", () => {
    fields.forEach((field) => field.reset());
    send();
  });
  fields.forEach((field) => field.reset());
}

function makeField(column) {
  const numeric = column.kind === "numeric";
  const input = numeric ? makeNumber() : makeChoice(column.categories);
  const seen = Object.assign(document.createElement("span"), { className: "seen", textContent: describe(column) });
  const box = document.createElement("label");
  box.append(column.name, input, seen);
  const value = () => input.value === "" ? null : numeric ? Number(input.value) : input.value;
  const check = () => box.classList.toggle("beyond", isBeyond(column, value()));
  const reset = () => { input.value = numeric ? round(column.mean ?? 0) : column.categories[0]; check(); };
  return { column, box, value, check, reset };
}

const makeNumber = () => Object.assign(document.createElement("input"), { type: "number", step: "any" });

function makeChoice(categories) {
  const choice = document.createElement("select");
  choice.append(new Option("(missing)", ""), ...categories.map((name) => new Option(name, name)));
  return choice;
}

function describe({ kind, low, high, missing }) {
  const range = kind === "numeric" && low != null ? `seen: ${round(low)} to ${round(high)}` : "";
  return [range, missing ? "may be left empty" : ""].filter(Boolean).join("; ");
}

function isBeyond({ kind, low, high, missing }, value) {
  if (value === null) return !missing;
  return kind === "numeric" && low != null && (value < low || value > high);
}

const round = (value) => Number(Number(value).toPrecision(5));
