// The test images, what the model says of each, and above all where it errs.

import { asInput, classes, testRows } from "./api.js";
import { picture } from "./draw.js";

const PAGE = 40;
const PART = 2000; // rows of a request
const PIXELS = 784;
const whole = new Intl.NumberFormat("en");

export class Gallery {
  constructor(page, chosen) {
    this.page = page;
    this.chosen = chosen;
    this.turn = 0; // counts models: answers for an earlier one are dropped
    for (const input of page.which) input.addEventListener("change", () => this.#show(0));
    page.earlier.addEventListener("click", () => this.#show(this.begin - PAGE));
    page.later.addEventListener("click", () => this.#show(this.begin + PAGE));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.said && this.#show(this.begin));
  }

  async use(model, maxRows) {
    const turn = ++this.turn;
    const { page } = this;
    this.said = null;
    page.tiles.replaceChildren();
    page.text.textContent = "asking the model about 10,000 images …";
    page.place.textContent = "";
    page.earlier.disabled = page.later.disabled = true;
    try {
      const test = await testRows();
      const said = [];
      const part = Math.min(PART, maxRows);
      for (let begin = 0; begin < test.count; begin += part) {
        const pixels = test.images.subarray(begin * PIXELS, Math.min(begin + part, test.count) * PIXELS);
        for (const id of await classes(model, asInput(model, pixels))) said.push(model.labels[id]);
        if (turn !== this.turn) return;
      }
      this.test = test;
      this.said = said;
      this.wrong = said.map((_, index) => index).filter((index) => said[index] !== String(test.labels[index]));
      const right = test.count - this.wrong.length;
      page.text.textContent =
        `${whole.format(right)} of ${whole.format(test.count)} right, ${whole.format(this.wrong.length)} mistakes`;
      this.#show(0);
    } catch (error) {
      if (turn === this.turn) page.text.textContent = error.message;
    }
  }

  #show(begin) {
    if (!this.said) return;
    const { page, test } = this;
    const wrongOnly = page.which.find((input) => input.checked).value === "wrong";
    const from = wrongOnly ? this.wrong : null;
    const count = from ? from.length : test.count;
    this.begin = Math.max(0, Math.min(begin, count - 1));
    this.begin -= this.begin % PAGE;
    const end = Math.min(this.begin + PAGE, count);
    const ink = getComputedStyle(page.tiles).color;
    const tiles = [];
    for (let at = this.begin; at < end; at++) tiles.push(this.#tile(from ? from[at] : at, ink));
    page.tiles.replaceChildren(...tiles);
    page.place.textContent = count ? `${whole.format(this.begin + 1)}–${whole.format(end)} of ${whole.format(count)}` : "none";
    page.earlier.disabled = this.begin === 0;
    page.later.disabled = end >= count;
  }

  #tile(index, ink) {
    const pixels = this.test.images.subarray(index * PIXELS, (index + 1) * PIXELS);
    const [is, said] = [String(this.test.labels[index]), this.said[index]];
    const item = document.createElement("li");
    const button = document.createElement("button");
    const caption = document.createElement("span");
    button.type = "button";
    button.className = is === said ? "right" : "wrong";
    button.setAttribute("aria-label", `Image ${index}: a ${is}, the model says ${said}`);
    caption.className = "said";
    caption.textContent = is === said ? is : `${is} → ${said}`;
    const canvas = picture(pixels, ink);
    canvas.setAttribute("aria-hidden", "true");
    button.append(canvas, caption);
    button.addEventListener("click", () => this.chosen(pixels));
    item.append(button);
    return item;
  }
}
