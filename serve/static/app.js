// Draw or drop an image, ask the service, show what it says. No library, no outside resource.

import { makeForm } from "./form.js";

const $ = (id) => document.getElementById(id);
const pad = $("pad");
const READ_BACK = { willReadFrequently: true };
const pen = pad.getContext("2d", READ_BACK);
const glass = $("seen").getContext("2d", READ_BACK);
const STEP = 7;             // pixels that an arrow key moves the pen
const INK = 24;             // width of a stroke on the 280-pixel pad
const VISIBLE = 24;         // ink fainter than this is none
const BOX = 20 / 28;        // MNIST fits digits into a 20-pixel box of its 28 pixels
const MOST_BARS = 10;

let card = null;
let last = null;            // the newest input as {body, type}, to ask again at another coverage
let asked = 0;              // answers may overtake each other: only the newest counts
let keyboard = { x: 140, y: 140, down: false };

async function start() {
  try {
    card = await (await fetch("model")).json();
  } catch (error) {
    showError(`The service does not answer (${error.message}).`);
    return;
  }
  $("model-name").textContent = card.name;
  const accuracy = typeof card.metrics.accuracy === "number" ? `, ${card.metrics.accuracy.toFixed(1)} % right on held-out ${card.table ? "rows" : "images"}` : "";
  $("model-line").textContent = `version ${card.version}, round ${card.round}${accuracy}`;
  showBars(card.classes.map(() => 0));
  offerCoverages();
  offerConfidences();
  if (card.table) {
    $("pictures").hidden = true;
    $("badge").textContent = "waiting for values";
    $("hint").textContent = `Give the values of one row. It knows ${list(card.classes)}.`;
    makeForm(card.table.columns, (row) => ask(JSON.stringify({ instances: [row] }), "application/json"));
    return;
  }
  const { width, height, channels } = card.input;
  $("seen").width = width;
  $("seen").height = height;
  const draws = channels === 1;
  pad.hidden = !draws;
  $("keys").hidden = !draws;
  $("hint").textContent = draws
    ? `Draw here (it knows ${list(card.classes)}), or drop, paste or choose an image.`
    : `Drop, paste or choose an image. It knows ${list(card.classes)}.`;
  clearAll();
}

const list = (names) => names.length > 12 ? `${names.slice(0, 10).join(", ")} … (${names.length} classes)` : names.join(", ");

function offerCoverages() {
  const calibration = card.abstention;
  if (!calibration) {
    $("threshold").textContent = "This student was exported without calibration rows: it never abstains.";
    return;
  }
  for (const row of [...calibration.table].reverse()) {
    const option = document.createElement("option");
    option.value = row.coverage;
    option.textContent = `answer ${percent(row.coverage)} (${row.risk.toFixed(1)} % wrong)`;
    option.selected = row.coverage === calibration.coverage;
    $("coverage").append(option);
  }
  $("coverage-row").hidden = false;
  showThreshold(calibration);
}

const CONFIDENCES = [0.8, 0.9, 0.95, 0.99];

function offerConfidences() {
  const sets = card.conformal;
  if (!sets) return;
  const highest = Math.max(0, ...sets.table.map((row) => row.confidence));
  for (const share of CONFIDENCES.filter((share) => share <= highest)) {
    $("confidence").append(new Option(`${percent(share)} of cases`, share, false, share === sets.confidence));
  }
  $("confidence-row").hidden = !$("confidence").length;
  $("set-note").textContent = `Over all ${card.table ? "rows" : "images"} like the ${sets.rows} it was calibrated on; not for one class or one site by itself.`;
  $("set-note").hidden = $("confidence-row").hidden;
}

const percent = (share) => `${+(100 * share).toFixed(1)} %`;

// ---- asking

async function ask(body, type) {
  last = { body, type };
  const number = ++asked;
  const headers = { "Content-Type": type };
  const token = sessionStorage.getItem("token");
  if (token) headers.Authorization = `Bearer ${token}`;
  const asks = ["coverage", "confidence"].filter((name) => $(name).value).map((name) => `${name}=${$(name).value}`);
  const query = asks.length ? `?${asks.join("&")}` : "";
  try {
    const response = await fetch(`predict${query}`, { method: "POST", headers, body });
    const answer = await response.json().catch(() => ({}));
    if (number !== asked) return;
    $("token-form").hidden = response.status !== 401;
    if (!response.ok) throw new Error(answer.error?.message ?? `the service answered ${response.status}`);
    showError("");
    show(answer);
  } catch (error) {
    if (number === asked) showError(error.message);
  }
}

const again = () => last && ask(last.body, last.type);

// ---- showing

function show({ predictions: [prediction], abstention, hint }) {
  const beyond = prediction.outside ?? [];
  $("beyond").hidden = !beyond.length;
  $("beyond").textContent = `Beyond what training saw: ${beyond.join(", ")}. Do not rely on the answer.`;
  if (hint) showError(hint);
  const label = $("label");
  label.textContent = prediction.class_name;
  label.classList.toggle("long", prediction.class_name.length > 3);
  label.classList.toggle("guess", prediction.abstain);
  const badge = $("badge");
  badge.textContent = prediction.abstain ? "abstains: I don't know" : "answers";
  badge.className = `badge ${prediction.abstain ? "unsure" : "sure"}`;
  $("foreign").hidden = !prediction.ood;
  const share = prediction.normalized_entropy;
  $("entropy").textContent = `${prediction.entropy.toFixed(3)} nats (${percent(share)})`;
  $("gauge").setAttribute("aria-valuenow", share.toFixed(3));
  $("gauge-fill").style.width = `${100 * share}%`;
  $("gauge-fill").classList.toggle("unsure", prediction.abstain);
  if (abstention) showThreshold(abstention);
  $("set").hidden = !prediction.set;
  $("set").textContent = prediction.set?.length > 1 ? `one of ${prediction.set.join(", ")}` : `only ${prediction.set?.[0]}`;
  showBars(prediction.probabilities);
}

function showThreshold({ threshold, coverage }) {
  const share = Math.min(1, threshold / Math.log(card.classes.length));
  $("gauge-tick").hidden = false;
  $("gauge-tick").style.left = `${100 * share}%`;
  $("threshold").textContent = coverage >= 1
    ? "It answers everything." : `It abstains above ${threshold.toFixed(3)} nats (the mark).`;
}

function showBars(probabilities) {
  let rows = probabilities.map((value, label) => ({ value, name: card.classes[label] }));
  const best = Math.max(...probabilities);
  if (rows.length > MOST_BARS) rows = rows.sort((a, b) => b.value - a.value).slice(0, MOST_BARS);
  $("bars").replaceChildren(...rows.map(({ value, name }) => {
    const item = document.createElement("li");
    if (value === best && value > 0) item.className = "best";
    const fill = Object.assign(document.createElement("div"), { className: "fill" });
    fill.style.width = `${100 * value}%`;
    const track = Object.assign(document.createElement("div"), { className: "track" });
    track.append(fill);
    const number = Object.assign(document.createElement("span"), { className: "number", textContent: `${(100 * value).toFixed(1)} %` });
    const text = Object.assign(document.createElement("span"), { textContent: name });
    item.append(text, track, number);
    return item;
  }));
}

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

function clearAll() {
  last = null;
  asked++;
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, pad.width, pad.height);
  $("picture").hidden = true;
  pad.hidden = card?.input.channels !== 1;
  $("file").value = "";
  keyboard = { x: 140, y: 140, down: false };
  glass.fillStyle = "#000";
  glass.fillRect(0, 0, $("seen").width, $("seen").height);
  $("label").textContent = "–";
  $("label").classList.remove("long", "guess");
  $("badge").textContent = "waiting for an image";
  $("badge").className = "badge waiting";
  $("entropy").textContent = "–";
  $("gauge-fill").style.width = "0";
  $("gauge").setAttribute("aria-valuenow", "0");
  $("set").hidden = $("foreign").hidden = true;
  showError("");
  if (card) showBars(card.classes.map(() => 0));
}

// ---- drawing

function stroke(from, to) {
  pen.strokeStyle = "#fff";
  pen.lineWidth = INK;
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  pen.moveTo(from.x, from.y);
  pen.lineTo(to.x, to.y);
  pen.stroke();
}

function place(event) {
  const box = pad.getBoundingClientRect();
  return { x: (event.clientX - box.left) * pad.width / box.width, y: (event.clientY - box.top) * pad.height / box.height };
}

let previous = null;
pad.addEventListener("pointerdown", (event) => {
  pad.setPointerCapture(event.pointerId);
  previous = place(event);
  stroke(previous, previous);
});
pad.addEventListener("pointermove", (event) => {
  if (!previous) return;
  for (const part of event.getCoalescedEvents?.() ?? [event]) {
    const next = place(part);
    stroke(previous, next);
    previous = next;
  }
});
for (const kind of ["pointerup", "pointercancel"]) {
  pad.addEventListener(kind, () => {
    if (previous) askDrawing();
    previous = null;
  });
}

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
pad.addEventListener("keydown", (event) => {
  const from = { x: keyboard.x, y: keyboard.y };
  if (event.key === "Escape") clearAll();
  else if (event.key === " ") {
    keyboard.down = !keyboard.down;
    if (keyboard.down) stroke(from, from);
    askSoon();
  } else if (MOVES[event.key]) {
    const [dx, dy] = MOVES[event.key];
    keyboard.x = Math.min(pad.width, Math.max(0, from.x + STEP * dx));
    keyboard.y = Math.min(pad.height, Math.max(0, from.y + STEP * dy));
    if (keyboard.down) {
      stroke(from, keyboard);
      askSoon();
    }
  } else return;
  event.preventDefault();
  showPen();
});

// Where the pen is, for those who steer it by keys: a ring laid over the pad, not into the drawing.
const ring = Object.assign(document.createElement("div"), { className: "ring", hidden: true });
Object.assign(ring.style, { position: "absolute", width: "18px", height: "18px", margin: "-9px", borderRadius: "50%",
  border: "3px solid #ff9d2e", pointerEvents: "none" });
$("drop").append(ring);
function showPen() {
  ring.hidden = false;
  ring.style.left = `${pad.offsetLeft + keyboard.x * pad.clientWidth / pad.width}px`;
  ring.style.top = `${pad.offsetTop + keyboard.y * pad.clientHeight / pad.height}px`;
  ring.style.background = keyboard.down ? "#ff9d2e" : "transparent";
}
pad.addEventListener("blur", () => { ring.hidden = true; });

let waiting = 0;
function askSoon() {
  clearTimeout(waiting);
  waiting = setTimeout(askDrawing, 120);
}

function askDrawing() {
  const rows = asModelSeesIt();
  if (rows) ask(JSON.stringify({ instances: [rows] }), "application/json");
}

// The training digits are scaled into a box and centred by their mass: do the same, or the model sees strangers.
function asModelSeesIt() {
  const { data, width, height } = pen.getImageData(0, 0, pad.width, pad.height);
  let left = width, right = -1, top = height, bottom = -1;
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      if (data[4 * (y * width + x)] > VISIBLE) {
        left = Math.min(left, x); right = Math.max(right, x);
        top = Math.min(top, y); bottom = Math.max(bottom, y);
      }
    }
  }
  if (right < 0) return null;
  const seen = $("seen");
  const size = { w: right - left + 1, h: bottom - top + 1 };
  const scale = Math.min(seen.width * BOX / size.w, seen.height * BOX / size.h);
  const drawn = { w: size.w * scale, h: size.h * scale };
  const paint = (dx, dy) => {
    glass.imageSmoothingQuality = "high";
    glass.fillStyle = "#000";
    glass.fillRect(0, 0, seen.width, seen.height);
    glass.drawImage(pad, left, top, size.w, size.h, (seen.width - drawn.w) / 2 + dx, (seen.height - drawn.h) / 2 + dy, drawn.w, drawn.h);
    return glass.getImageData(0, 0, seen.width, seen.height).data;
  };
  const centre = massCentre(paint(0, 0), seen.width, seen.height);
  const pixels = paint(Math.round((seen.width - 1) / 2 - centre.x), Math.round((seen.height - 1) / 2 - centre.y));
  return Array.from({ length: seen.height }, (_, y) =>
    Array.from({ length: seen.width }, (_, x) => inRange(pixels[4 * (y * seen.width + x)])));
}

// Of ink and paper, which are 0 to 255, to what the model takes.
function inRange(value) {
  const [low, high] = card.normalisation.range ?? [0, 255];
  return low + value * (high - low) / 255;
}

function massCentre(pixels, width, height) {
  let mass = 0, x = 0, y = 0;
  for (let at = 0; at < width * height; at++) {
    const value = pixels[4 * at];
    mass += value;
    x += value * (at % width);
    y += value * Math.floor(at / width);
  }
  return { x: x / mass, y: y / mass };
}

// ---- images

// What the service reads, whether or not the browser can show it.
const KINDS = { png: "image/png", jpg: "image/jpeg", jpeg: "image/jpeg", tif: "image/tiff", tiff: "image/tiff",
  npy: "application/x-npy", dcm: "application/dicom" };
const kindOf = (file) => KINDS[(file.name ?? "").split(".").pop().toLowerCase()] ?? file.type;

async function take(file) {
  if (!file || card?.table) return;
  clearAll();
  const kind = kindOf(file);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    if (Object.values(KINDS).slice(3).includes(kind)) await ask(file, kind);
    else showError(`${file.name || "This"} is not an image that the browser can read.`);
    return;
  }
  const picture = $("picture");
  if (picture.src) URL.revokeObjectURL(picture.src);
  picture.src = URL.createObjectURL(file);
  picture.hidden = false;
  pad.hidden = true;
  const seen = $("seen");
  glass.filter = filterFor();
  glass.drawImage(bitmap, 0, 0, seen.width, seen.height);
  glass.filter = "none";
  const plain = !$("invert").checked && ["image/png", "image/jpeg"].includes(kind);
  const body = plain ? file : await asPng(bitmap);
  await ask(body, plain ? kind : "image/png");
}

const filterFor = () => $("invert").checked ? "invert(1)" : "none";

function asPng(bitmap) {
  const canvas = Object.assign(document.createElement("canvas"), { width: bitmap.width, height: bitmap.height });
  const context = canvas.getContext("2d");
  context.filter = filterFor();
  context.drawImage(bitmap, 0, 0);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

let chosen = null;
const choose = (file) => { chosen = file; take(file); };
$("file").addEventListener("change", (event) => choose(event.target.files[0]));
$("file").addEventListener("focus", () => document.querySelector("label[for=file]").classList.add("focused"));
$("file").addEventListener("blur", () => document.querySelector("label[for=file]").classList.remove("focused"));
$("invert").addEventListener("change", () => { if (!$("picture").hidden) take(chosen); });
$("clear").addEventListener("click", () => { chosen = null; clearAll(); });
$("coverage").addEventListener("change", again);
$("confidence").addEventListener("change", again);
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", $("token").value.trim());
  again();
});
document.addEventListener("dragover", (event) => { event.preventDefault(); $("drop").classList.add("over"); });
document.addEventListener("dragleave", () => $("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  choose(event.dataTransfer.files[0]);
});
document.addEventListener("paste", (event) => choose(event.clipboardData.files[0]));

start();
