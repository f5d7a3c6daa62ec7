// The drawing area: strokes by mouse, finger or keys, and the 28 x 28 pixels that they become.

const SIDE = 28;
const FINE = 8; // sub-pixels a pixel each way, averaged: anti-aliasing
const BOX = 20; // MNIST's digits fit in a box of 20 x 20 pixels
const PEN = 2.5; // pixels; the strokes of MNIST's digits are about as wide
const STEP = 0.035; // of the side, for a press of an arrow key
const SMALLEST = 0.2; // of the side: a dot is not blown up to a blot
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Pad {
  constructor(canvas, { changed, said }) {
    this.canvas = canvas;
    this.changed = changed;
    this.said = said;
    this.strokes = [];
    this.image = null; // of the gallery, in place of strokes
    this.cursor = [0.5, 0.25];
    this.down = false;
    this.keyed = false;
    this.held = new Set();
    this.pointer = null;
    const on = (name, act) => canvas.addEventListener(name, act);
    on("pointerdown", (event) => this.#press(event));
    on("pointermove", (event) => this.#drag(event));
    for (const name of ["pointerup", "pointercancel"]) {
      on(name, (event) => {
        if (event.pointerId === this.pointer) this.pointer = null; // a second finger ends no stroke
      });
    }
    on("keydown", (event) => this.#key(event));
    on("keyup", (event) => this.held.delete(event.key));
    on("blur", () => {
      this.held.clear();
      this.#lift();
      this.keyed = false;
      this.paint();
    });
    new ResizeObserver(() => this.paint()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
  }

  get empty() {
    return !this.strokes.length && !this.image;
  }

  clear() {
    this.strokes = [];
    this.image = null;
    this.pointer = null; // a stroke that is being drawn is over
    this.#lift();
    this.#update();
  }

  show(image) {
    this.clear();
    this.image = image;
    this.#update();
  }

  // ---- input

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const clip = (value) => Math.min(1, Math.max(0, value));
    return [clip((event.clientX - box.left) / box.width), clip((event.clientY - box.top) / box.height)];
  }

  #press(event) {
    if (event.button !== 0 || this.pointer !== null) return;
    event.preventDefault();
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    this.pointer = event.pointerId;
    this.keyed = false;
    this.#lift();
    this.#begin(this.#at(event));
  }

  #drag(event) {
    if (event.pointerId !== this.pointer) return;
    const events = event.getCoalescedEvents?.() ?? [];
    for (const each of events.length ? events : [event]) this.strokes.at(-1).push(this.#at(each));
    this.#update();
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in MOVES) {
      this.held.add(event.key); // two at a time go diagonally
      const from = this.cursor;
      let [x, y] = from;
      for (const key of this.held) {
        x += MOVES[key][0] * STEP;
        y += MOVES[key][1] * STEP;
      }
      this.cursor = [x, y].map((value) => Math.min(0.95, Math.max(0.05, value)));
      if (this.down) this.strokes.at(-1).push(this.cursor);
    } else if (event.key === " ") {
      if (event.repeat) return event.preventDefault();
      if (this.down) this.#lift();
      else {
        this.#begin(this.cursor);
        this.down = true;
      }
      this.said(this.down ? "pen down" : "pen up");
    } else if (event.key === "Delete" || event.key === "Backspace") {
      this.clear();
      this.said("cleared");
    } else return;
    event.preventDefault();
    this.keyed = true;
    this.#update();
  }

  #begin(point) {
    if (this.image) {
      this.image = null;
      this.strokes = [];
    }
    this.strokes.push([point]);
    this.#update();
  }

  #lift() {
    this.down = false;
  }

  #update() {
    this.paint();
    this.changed();
  }

  // ---- what is seen

  paint() {
    const { canvas } = this;
    const side = Math.round(canvas.clientWidth * devicePixelRatio);
    if (!side) return;
    if (canvas.width !== side) canvas.width = canvas.height = side;
    const style = getComputedStyle(canvas);
    const ink = style.color;
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, side, side);
    if (this.image) {
      context.imageSmoothingEnabled = true;
      context.imageSmoothingQuality = "high";
      const edge = side * 0.08;
      context.drawImage(picture(this.image, ink), edge, edge, side - 2 * edge, side - 2 * edge);
    }
    trace(context, this.strokes, ink, side * 0.065, ([x, y]) => [x * side, y * side]);
    if (!this.keyed) return;
    const [x, y] = this.cursor.map((value) => value * side);
    context.beginPath();
    context.arc(x, y, side * 0.045, 0, 7);
    context.lineWidth = side * 0.008;
    context.strokeStyle = style.getPropertyValue("--accent");
    context.stroke();
    if (this.down) {
      context.beginPath();
      context.arc(x, y, side * 0.018, 0, 7);
      context.fillStyle = style.getPropertyValue("--accent");
      context.fill();
    }
  }

  // The drawing as MNIST would hold it: 20 x 20 pixels at most, the centre of mass in the middle of 28 x 28.
  pixels() {
    if (this.image) return this.image;
    const points = this.strokes.flat();
    const [xs, ys] = [0, 1].map((axis) => points.map((point) => point[axis]));
    const size = Math.max(Math.max(...xs) - Math.min(...xs), Math.max(...ys) - Math.min(...ys), SMALLEST);
    const scale = (BOX - PEN) / size;
    const middle = [(Math.max(...xs) + Math.min(...xs)) / 2, (Math.max(...ys) + Math.min(...ys)) / 2];
    const place = (dx, dy) => ([x, y]) => [
      ((x - middle[0]) * scale + SIDE / 2 + dx) * FINE,
      ((y - middle[1]) * scale + SIDE / 2 + dy) * FINE,
    ];
    const first = raster(this.strokes, place(0, 0));
    let [mass, massX, massY] = [0, 0, 0];
    first.forEach((value, index) => {
      mass += value;
      massX += value * ((index % SIDE) + 0.5);
      massY += value * (Math.floor(index / SIDE) + 0.5);
    });
    return raster(this.strokes, place((SIDE + 1) / 2 - massX / mass, (SIDE + 1) / 2 - massY / mass));
  }
}

function trace(context, strokes, colour, width, place) {
  context.lineCap = context.lineJoin = "round";
  context.lineWidth = width;
  context.strokeStyle = colour;
  for (const stroke of strokes) {
    context.beginPath();
    const points = stroke.map(place);
    context.moveTo(...points[0]);
    if (points.length === 1) context.lineTo(points[0][0] + 0.01, points[0][1]);
    for (const point of points.slice(1)) context.lineTo(...point);
    context.stroke();
  }
}

function raster(strokes, place) {
  const canvas = document.createElement("canvas");
  const side = (canvas.width = canvas.height = SIDE * FINE);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  trace(context, strokes, "#fff", PEN * FINE, place);
  const { data } = context.getImageData(0, 0, side, side);
  const sums = new Float64Array(SIDE * SIDE);
  for (let y = 0; y < side; y++) {
    for (let x = 0; x < side; x++) {
      sums[Math.floor(y / FINE) * SIDE + Math.floor(x / FINE)] += data[4 * (y * side + x) + 3];
    }
  }
  return Uint8Array.from(sums, (sum) => Math.round(sum / (FINE * FINE)));
}

// 28 x 28 bytes as a canvas: the ink's colour, as opaque as the pixel is bright.
export function picture(pixels, ink, canvas = document.createElement("canvas")) {
  canvas.width = canvas.height = SIDE;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = ink;
  context.fillRect(0, 0, SIDE, SIDE);
  const image = context.getImageData(0, 0, SIDE, SIDE);
  pixels.forEach((value, index) => (image.data[4 * index + 3] = value));
  context.putImageData(image, 0, 0);
  return canvas;
}
