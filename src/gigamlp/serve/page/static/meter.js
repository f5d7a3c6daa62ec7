// Streams batches through the server and shows the rows answered in the last second.

import { classes } from "./api.js";

const SECONDS = 10;
const ROWS = [1, 64, 256, 1024, 4096, 8192];
const WINDOW = 1000; // ms
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export class Meter {
  // `batch(model, rows)` gives a body of so many rows
  constructor(page, batch) {
    this.page = page;
    this.batch = batch;
    this.model = null;
    this.stopping = null;
    page.go.addEventListener("click", () => (this.stopping ? this.stop() : this.run()));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw([]));
  }

  use(model, maxRows) {
    this.stop();
    this.model = model;
    const wanted = Number(this.page.rows.value) || 1024;
    const fit = ROWS.filter((rows) => rows <= maxRows);
    const rows = fit.length ? fit : [maxRows];
    this.page.rows.replaceChildren(...rows.map((n) => new Option(whole.format(n), n, false, n === wanted)));
    if (!rows.includes(wanted)) this.page.rows.value = rows.at(-1);
    this.page.rate.textContent = "0";
    this.page.text.textContent = "";
    this.#draw([]);
  }

  stop() {
    this.stopping?.abort();
  }

  async run() {
    const { page, model } = this;
    const stopping = (this.stopping = new AbortController());
    page.go.textContent = "Stop";
    page.text.textContent = "";
    page.rows.disabled = page.many.disabled = true;
    const rows = Number(page.rows.value);
    const done = []; // [when, rows]
    const times = [];
    const points = [];
    let trouble = null;
    let show = 0;
    try {
      const body = await this.batch(model, rows);
      const begin = performance.now();
      const ask = async () => {
        while (!stopping.signal.aborted) {
          const before = performance.now();
          await classes(model, body, stopping.signal);
          const now = performance.now();
          done.push([now, rows]);
          times.push(now - before);
          if (now - begin > SECONDS * 1000) stopping.abort();
        }
      };
      show = setInterval(() => {
        points.push(recent(done, begin));
        page.rate.textContent = whole.format(points.at(-1));
        this.#draw(points);
      }, 100);
      const all = Array.from({ length: Number(page.many.value) }, ask);
      await Promise.all(all).catch((error) => {
        stopping.abort();
        if (error.name !== "AbortError") throw error;
      });
      await Promise.allSettled(all);
      const seconds = ((done.at(-1)?.[0] ?? begin) - begin) / 1000;
      if (seconds > 0) {
        times.sort((a, b) => a - b);
        const rate = (done.length * rows) / seconds;
        page.rate.textContent = whole.format(rate);
        const middle = times[Math.floor(times.length / 2)].toFixed(times[0] < 10 ? 1 : 0);
        page.text.textContent =
          `${whole.format(done.length * rows)} rows in ${seconds.toFixed(1)} s, ${middle} ms a request (median)`;
      }
    } catch (error) {
      trouble = error;
    }
    clearInterval(show);
    stopping.abort();
    this.stopping = null;
    if (trouble) page.text.textContent = trouble.message;
    page.go.textContent = "Start";
    page.rows.disabled = page.many.disabled = false;
  }

  #draw(points) {
    const { trace } = this.page;
    const [width, height] = [trace.clientWidth, trace.clientHeight].map((n) => Math.round(n * devicePixelRatio));
    if (!width) return;
    Object.assign(trace, { width, height });
    if (points.length < 2) return;
    const context = trace.getContext("2d");
    const accent = getComputedStyle(trace).getPropertyValue("--accent");
    const most = Math.max(...points) * 1.1 || 1;
    const step = width / (SECONDS * 10);
    const pen = 2 * devicePixelRatio;
    context.beginPath();
    points.forEach((value, index) => context.lineTo(index * step, height - pen - (value / most) * (height - 2 * pen)));
    context.lineWidth = pen;
    context.lineJoin = "round";
    context.strokeStyle = accent;
    context.stroke();
    context.lineTo((points.length - 1) * step, height);
    context.lineTo(0, height);
    context.globalAlpha = 0.12;
    context.fillStyle = accent;
    context.fill();
  }
}

function recent(done, begin) {
  const now = performance.now();
  const from = Math.max(begin, now - WINDOW);
  let rows = 0;
  for (let i = done.length - 1; i >= 0 && done[i][0] >= from; i--) rows += done[i][1];
  return now - from > 50 ? (rows / (now - from)) * 1000 : 0;
}
