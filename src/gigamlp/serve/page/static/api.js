// What the page asks the server. The token lives in this module's memory and nowhere else.

let token = "";

export class Failed extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const tokenNeeded = () => document.documentElement.dataset.token === "yes";

export function setToken(value) {
  token = value;
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (token) headers.Authorization = `Bearer ${token}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failed(0, "The server does not answer.");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw new Failed(response.status, said.error ?? `The server answered with status ${response.status}.`);
}

export const listModels = async () => (await ask("page/models")).json();

const at = (model) => `${encodeURIComponent(model.name)}/versions/${encodeURIComponent(model.version)}`;

const OCTETS = { "Content-Type": "application/octet-stream" };

// One row: the answer, what the model took (us) and what the round trip took (ms).
export async function answer(model, body) {
  const raw = typeof body !== "string";
  const headers = raw ? OCTETS : { "Content-Type": "application/json" };
  const begin = performance.now();
  const response = await ask(`page/models/${at(model)}/answer`, { method: "POST", body, headers });
  const found = await response.json();
  return { ...found, trip_ms: performance.now() - begin };
}

const READ = { UINT8: Uint8Array, UINT16: Uint16Array, UINT32: Uint32Array, FP32: Float32Array };

// Many rows, raw: what comes back is a class id a row.
export async function classes(model, body, signal) {
  const response = await ask(`v2/models/${at(model)}/infer`, { method: "POST", body, headers: OCTETS, signal });
  return new READ[model.output_datatype](await response.arrayBuffer());
}

let test = null;

// The 10,000 test images and their digits, fetched once.
export function testRows() {
  test ??= (async () => {
    const [images, labels] = await Promise.all(
      ["images", "labels"].map(async (part) => new Uint8Array(await (await ask(`page/test/${part}`)).arrayBuffer())),
    );
    return { images: images.subarray(16), labels: labels.subarray(8), count: labels.length - 8 };
  })().catch((error) => {
    test = null;
    throw error;
  });
  return test;
}

// Bytes of pixels as the model takes them.
export function asInput(model, pixels) {
  if (model.datatype === "UINT8") return pixels;
  return Float32Array.from(pixels, (value) => value * model.pixel_scale);
}
