// Puts the parts together: which model, what is asked, what is answered.

import { Failed, answer, asInput, listModels, setToken, testRows, tokenNeeded } from "./api.js";
import { Pad, picture } from "./draw.js";
import { Gallery } from "./gallery.js";
import { Meter } from "./meter.js";

const $ = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");
const TYPES = { UINT8: Uint8Array, INT8: Int8Array, FP32: Float32Array };

let models = [];
let model = null;
let maxRows = 1;
let wanted = false; // an answer to what is drawn now
let asking = false;

const pad = new Pad($("pad"), { changed: drawn, said: (text) => ($("pad-state").textContent = text) });
const meter = new Meter(
  { go: $("meter-go"), rows: $("meter-rows"), many: $("meter-many"), rate: $("rate"), text: $("meter-text"), trace: $("trace") },
  batch,
);
const gallery = new Gallery(
  {
    tiles: $("tiles"), text: $("gallery-text"), place: $("place"), earlier: $("earlier"), later: $("later"),
    which: [...document.querySelectorAll("input[name=which]")],
  },
  (pixels) => {
    pad.show(pixels);
    $("try").scrollIntoView({ block: "start", behavior: "smooth" });
    $("pad").focus({ preventScroll: true });
  },
);

// ---- models

function choose(next) {
  model = next;
  const { digits } = model;
  $("try-title").textContent = digits ? "Draw a digit" : "Ask the model";
  $("digit-ask").hidden = $("seen-box").hidden = $("gallery").hidden = !digits;
  $("numbers-ask").hidden = digits;
  $("try").hidden = $("about").hidden = false;
  $("meter").hidden = !(model.datatype in TYPES);
  $("numbers-label").textContent = `${whole.format(model.features)} ${model.features === 1 ? "number" : "numbers"}, separated by spaces or commas (${model.datatype})`;
  forget();
  facts();
  meter.use(model, maxRows);
  if (digits) {
    gallery.use(model, maxRows);
    drawn();
  }
}

function facts() {
  const scheme = model.scheme ? ` (${model.scheme})` : "";
  const said = {
    Layers: model.widths.join(" – ") + scheme,
    "Runs by": `${model.engine} on ${model.device}`,
    Input: `rows ${model.datatype} [n, ${model.features}]`,
    Outputs: model.outputs.map((each) => `${each.name} ${each.datatype}`).join(", "),
    Head: model.classes ? `${model.head}, ${whole.format(model.classes)} classes` : model.head,
    Version: model.version,
  };
  $("facts").replaceChildren(
    ...Object.entries(said).map(([name, value]) => {
      const pair = document.createElement("div");
      pair.append(element("dt", name), element("dd", value));
      return pair;
    }),
  );
}

function element(tag, text, className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

function list() {
  const several = new Set(models.map((each) => each.name)).size < models.length;
  $("model").replaceChildren(
    ...models.map((each, index) => new Option(several ? `${each.name}, version ${each.version}` : each.name, index)),
  );
  $("model").disabled = false;
}

$("model").addEventListener("change", (event) => choose(models[event.target.value]));

// ---- asking

function drawn() {
  $("pad-empty").hidden = !pad.empty;
  $("clear").disabled = pad.empty;
  if (pad.empty) return forget();
  wanted = true;
  if (!asking) requestAnimationFrame(() => asking || keepAsking());
}

// One request at a time, for the newest drawing.
async function keepAsking() {
  asking = true;
  while (wanted && model?.digits && !pad.empty) {
    wanted = false;
    const [now, pixels] = [model, pad.pixels()];
    picture(pixels, getComputedStyle($("seen")).color, $("seen"));
    await show(now, asInput(now, pixels), () => pad.empty);
  }
  asking = false;
}

async function show(from, body, overtaken = () => false) {
  try {
    const found = await answer(from, body);
    if (from === model && !overtaken()) present(found);
    problem("");
  } catch (error) {
    if (from === model) await failed(error);
  }
}

$("clear").addEventListener("click", () => {
  pad.clear();
  $("pad").focus();
});

$("numbers-ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const words = $("numbers").value.split(/[\s,;]+/).filter(Boolean);
  const data = words.map(Number);
  const odd = data.findIndex((value) => !Number.isFinite(value));
  if (odd >= 0) return problem(`“${words[odd]}” is not a number.`);
  if (data.length !== model.features) {
    return problem(`The model takes ${whole.format(model.features)} numbers, and there are ${whole.format(data.length)}.`);
  }
  const rows = { name: "rows", datatype: model.datatype, shape: [1, model.features], data };
  await show(model, JSON.stringify({ inputs: [rows] }));
});

$("zeros").addEventListener("click", () => ($("numbers").value = Array(model.features).fill(0).join(" ")));

// Rows for the meter: the test images, or the numbers in the field.
async function batch(of, rows) {
  const { features } = of;
  if (of.digits) {
    const { images, count } = await testRows();
    const body = new Uint8Array(rows * features);
    for (let row = 0; row < rows; row++) {
      const from = (row % count) * features;
      body.set(images.subarray(from, from + features), row * features);
    }
    return asInput(of, body);
  }
  const data = $("numbers").value.split(/[\s,;]+/).filter(Boolean).map(Number);
  const body = new TYPES[of.datatype](rows * features);
  if (data.length === features) for (let row = 0; row < rows; row++) body.set(data, row * features);
  return body;
}

// ---- answers

function forget() {
  const verdict = $("verdict");
  verdict.textContent = "–";
  verdict.className = "digit none";
  $("verdict-text").textContent = "";
  $("model-time").textContent = $("trip-time").textContent = "–";
  picture(new Uint8Array(784), "#000", $("seen"));
  bars(model?.digits ? model.labels.map((label) => ({ label, proba: null })) : [], null);
}

let saying = 0;

function present(found) {
  const verdict = $("verdict");
  const several = found.prediction?.map((value) => String(Number(value.toPrecision(6))));
  const text = several ? several.slice(0, 10).join(", ") + (several.length > 10 ? ", …" : "") : found.class;
  verdict.textContent = text;
  verdict.className = text.length > 3 ? "digit long" : "digit";
  bars(found.top ?? [], found.class);
  $("model-time").textContent = duration(found.model_us);
  $("trip-time").textContent = duration(found.trip_ms * 1000);
  clearTimeout(saying); // a screen reader is told when the drawing rests
  const best = found.top?.find((each) => each.label === found.class);
  saying = setTimeout(() => ($("verdict-text").textContent = best ? `${text}, ${percent(best.proba)}` : text), 400);
}

function bars(top, best) {
  const list = $("bars");
  while (list.children.length > top.length) list.lastChild.remove();
  top.forEach(({ label, proba }, index) => {
    let item = list.children[index];
    if (!item) {
      item = document.createElement("li");
      const track = element("span", "", "track");
      track.setAttribute("aria-hidden", "true");
      track.append(element("span", "", "level"));
      item.append(element("span", "", "name"), track, element("span", "", "value"));
      list.append(item);
    }
    const [name, track, value] = item.children;
    item.className = label === best ? "best" : "";
    name.textContent = name.title = label;
    track.firstChild.style.width = `${(proba ?? 0) * 100}%`;
    value.textContent = proba === null ? "" : percent(proba);
  });
}

const percent = (value) => `${(100 * value).toFixed(1)} %`;

function duration(us) {
  if (us < 100) return `${us.toFixed(1)} µs`;
  return us < 1000 ? `${us.toFixed(0)} µs` : `${(us / 1000).toFixed(us < 10_000 ? 2 : 0)} ms`;
}

// ---- trouble

function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

async function failed(error) {
  if (!(error instanceof Failed)) throw error;
  if (error.status === 404 && model) {
    await load(); // it was replaced by another version, or removed
    return;
  }
  problem(error.message);
}

// ---- begin

async function load() {
  const found = await listModels();
  const before = model;
  models = found.models;
  maxRows = found.max_rows;
  list();
  if (!models.length) return problem("This server has no models at present.");
  problem("");
  const same = models.findIndex((each) => each.name === before?.name);
  $("model").value = Math.max(0, same);
  choose(models[Math.max(0, same)]);
}

async function begin() {
  try {
    await load();
  } catch (error) {
    await failed(error);
  }
}

if (tokenNeeded()) {
  const box = $("token-box");
  box.addEventListener("cancel", (event) => event.preventDefault());
  $("token-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    setToken($("token").value);
    try {
      await load();
      $("token").value = "";
      box.close();
    } catch (error) {
      if (!(error instanceof Failed)) throw error;
      $("token-problem").textContent = error.status === 401 ? "This is not the server’s token." : error.message;
      $("token-problem").hidden = false;
      $("token").select();
    }
  });
  box.showModal();
} else {
  await begin();
}
