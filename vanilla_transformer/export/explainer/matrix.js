/** Numbers as colours: a canvas that is a grid for the keyboard and for screen readers. */

/** @import { Cell } from "./explain.js" */
import { element, format, say } from "./texts.js";

/**
 * @typedef {object} MatrixOptions
 * @property {string} title  What it is called.
 * @property {number} rows
 * @property {number} columns
 * @property {(row: number, column: number) => number} read
 * @property {(row: number, column: number) => Cell} cellOf
 * @property {string[]} rowLabels
 * @property {string[]} [columnLabels]  Without them, columns are dimensions.
 * @property {(column: number) => string} [nameColumn]  What a column is called where it has no label.
 * @property {boolean} [isShare]  Whether numbers are from 0 to 1; else they lie on both sides of 0.
 * @property {number} [current]  The row that is looked at.
 * @property {(cell: Cell) => void} onChoose
 */

const ROW = 20, SQUARE = 26, WIDEST = 14;  // pixels
const MARGIN = 300;  // pixels beside the screen in which matrices are drawn, too
const COLORS = { paper: "--panel", positive: "--positive", negative: "--negative", strong: "--strong", mark: "--mark" };

/** @typedef {Record<keyof typeof COLORS, [number, number, number]>} Colors */
/** @type {Colors | undefined} */
let colors;

/** Forgets the colours of the theme. */
export function forgetColors() {
  colors = undefined;
}

/** @returns {Colors} */
function findColors() {
  if (colors) return colors;
  const probe = element("span");
  document.body.append(probe);
  const entries = Object.entries(COLORS).map(([name, variable]) => {
    probe.style.color = `var(${variable})`;
    return [name, (getComputedStyle(probe).color.match(/[\d.]+/g) ?? []).slice(0, 3).map(Number)];
  });
  probe.remove();
  colors = /** @type {Colors} */ (Object.fromEntries(entries));
  return colors;
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {number} width  Pixels of the page.
 * @param {number} height
 */
function resize(canvas, width, height) {
  const ratio = globalThis.devicePixelRatio || 1;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  return ratio;
}

/**
 * Fills a canvas with the colours of numbers.
 * @param {HTMLCanvasElement} canvas
 * @param {Pick<MatrixOptions, "rows" | "columns" | "read" | "isShare">} options
 */
function paint(canvas, { rows, columns, read, isShare }) {
  const { paper, positive, negative } = findColors();
  const numbers = new Float32Array(rows * columns);
  let most = isShare ? 1 : 1e-9;
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const number = read(row, column);
      numbers[row * columns + column] = number;
      if (!isShare) most = Math.max(most, Math.abs(number));
    }
  }
  const image = new ImageData(columns, rows);
  numbers.forEach((number, place) => {
    const color = number < 0 ? negative : positive;
    // Shares are what they are; of other numbers, the root makes the small ones stronger, so that they can be seen.
    const share = isShare ? number : Math.sqrt(Math.abs(number) / most);
    for (let channel = 0; channel < 3; channel++) {
      image.data[4 * place + channel] = paper[channel] + (color[channel] - paper[channel]) * share;
    }
    image.data[4 * place + 3] = 255;
  });
  const small = new OffscreenCanvas(columns, rows);
  small.getContext("2d")?.putImageData(image, 0, 0);
  const context = canvas.getContext("2d");
  if (!context) return;
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
}

/**
 * A small picture of attention.
 * @param {Pick<MatrixOptions, "rows" | "columns" | "read">} options
 */
export function makeThumbnail({ rows, columns, read }) {
  const canvas = document.createElement("canvas");
  const side = Math.max(3, Math.floor(72 / Math.max(rows, columns)));
  resize(canvas, columns * side, rows * side);
  paint(canvas, { rows, columns, read, isShare: true });
  return canvas;
}

/** A matrix on the page. */
export class Matrix {
  /**
   * @param {MatrixOptions} options
   * @param {number} width  How many pixels there are for labels and numbers.
   */
  constructor(options, width) {
    this.options = options;
    const { columns, columnLabels, rowLabels, title, rows } = options;
    const labels = element("div", { class: "row-labels", "aria-hidden": "true" });
    rowLabels.slice(0, rows).forEach((label, row) => {
      labels.append(element("span", row === options.current ? { class: "current" } : {}, label));
    });
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    const id = `cell-${Matrix.count++}`;
    const attributes = { role: "grid", "aria-label": title, "aria-rowcount": rows, "aria-colcount": columns };
    for (const [name, value] of Object.entries({ ...attributes, "aria-activedescendant": id })) {
      this.canvas.setAttribute(name, `${value}`);
    }
    this.told = element("div", { role: "gridcell", id });
    this.canvas.append(element("div", { role: "row" }, this.told));
    const space = Math.max(120, width - 92);
    this.cellHeight = columnLabels ? SQUARE : ROW;
    this.cellWidth = columnLabels ? Math.min(SQUARE, space / columns) : Math.min(WIDEST, space / columns);
    /** @type {[number, number]} */
    this.at = [options.current ?? 0, 0];
    /** @type {[number, number, number, number][]} First and last row and column of what is framed. */
    this.frames = [];
    this.element = element("div", { class: "matrix" }, labels, this.canvas);
    if (columnLabels) {
      const above = element("div", { class: "column-labels", "aria-hidden": "true" },
        ...columnLabels.slice(0, columns).map((label) => element("span", {}, label)));
      above.style.setProperty("--cell", `${this.cellWidth}px`);
      this.element.prepend(element("span"), above);
    }
    labels.style.setProperty("--cell", `${this.cellHeight}px`);
    this.canvas.style.width = `${columns * this.cellWidth}px`;
    this.canvas.style.height = `${this.options.rows * this.cellHeight}px`;
    /** What is off the screen is drawn once it comes in sight. */
    this.isDrawn = false;
    this.listen();
  }

  isOnScreen() {
    const { top, bottom, width } = this.canvas.getBoundingClientRect();
    return width > 0 && bottom > -MARGIN && top < innerHeight + MARGIN;
  }

  draw() {
    const { rows, columns, current } = this.options;
    this.isDrawn = true;
    const ratio = resize(this.canvas, columns * this.cellWidth, rows * this.cellHeight);
    paint(this.canvas, this.options);
    const context = this.canvas.getContext("2d");
    if (!context) return;
    context.scale(ratio, ratio);
    const { strong, mark } = findColors();
    const frame = (/** @type {number[]} */ [top, bottom, left, right], /** @type {number[]} */ color) => {
      context.strokeStyle = `rgb(${color.join()})`;
      context.lineWidth = 2;
      const [x, y] = [left * this.cellWidth, top * this.cellHeight];
      const [w, h] = [(right - left + 1) * this.cellWidth, (bottom - top + 1) * this.cellHeight];
      context.strokeRect(x + 1, y + 1, Math.max(w - 2, 1), Math.max(h - 2, 1));
    };
    if (current !== undefined) frame([current, current, 0, columns - 1], mark);
    for (const each of this.frames) frame(each, strong);
    if (document.activeElement === this.canvas) frame([this.at[0], this.at[0], this.at[1], this.at[1]], strong);
  }

  /**
   * Frames the cells from one corner to another, or none.
   * @param {[number, number, number, number][]} frames
   */
  frame(frames) {
    if (!frames.length && !this.frames.length) return;
    this.frames = frames;
    this.isDrawn = false;
  }

  /**
   * @param {number} row
   * @param {number} column
   */
  describe(row, column) {
    const { rowLabels, columnLabels, nameColumn, read } = this.options;
    const where = columnLabels ? columnLabels[column] : nameColumn?.(column) ?? `${column}`;
    return `${rowLabels[row]} · ${where}: ${format(read(row, column))}`;
  }

  /** @param {[number, number]} at */
  move([row, column]) {
    const { rows, columns } = this.options;
    this.at = [Math.min(Math.max(row, 0), rows - 1), Math.min(Math.max(column, 0), columns - 1)];
    this.told.setAttribute("aria-rowindex", `${this.at[0] + 1}`);
    this.told.setAttribute("aria-colindex", `${this.at[1] + 1}`);
    this.told.textContent = this.describe(...this.at);
    this.draw();
    const { left, top } = this.canvas.getBoundingClientRect();
    showTip(this.told.textContent, left + (this.at[1] + 1) * this.cellWidth, top + this.at[0] * this.cellHeight);
  }

  choose() {
    this.options.onChoose(this.options.cellOf(...this.at));
  }

  /**
   * @param {PointerEvent | MouseEvent} event
   * @returns {[number, number]}
   */
  locate({ offsetX, offsetY }) {
    const clamp = (/** @type {number} */ place, /** @type {number} */ count) =>
      Math.min(Math.max(Math.floor(place), 0), count - 1);
    return [clamp(offsetY / this.cellHeight, this.options.rows), clamp(offsetX / this.cellWidth, this.options.columns)];
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType !== "touch") showTip(this.describe(...this.locate(event)), event.clientX, event.clientY);
    });
    canvas.addEventListener("pointerleave", () => showTip("", 0, 0));
    canvas.addEventListener("click", (event) => {
      this.at = this.locate(event);
      this.choose();
    });
    canvas.addEventListener("focus", () => this.move(this.at));
    canvas.addEventListener("blur", () => {
      showTip("", 0, 0);
      this.draw();
    });
    canvas.addEventListener("keydown", (event) => {
      const { rows, columns } = this.options, [row, column] = this.at;
      /** @type {Record<string, [number, number]>} */
      const moves = {
        ...{ ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1] },
        ...{ ArrowRight: [row, column + 1], Home: [row, 0], End: [row, columns - 1] },
        ...{ PageUp: [0, column], PageDown: [rows - 1, column] },
      };
      if (event.key in moves) this.move(moves[event.key]);
      else if (event.key === "Enter" || event.key === " ") this.choose();
      else return;
      event.preventDefault();
    });
  }
}
Matrix.count = 0;

/**
 * Draws what is on the screen and not drawn yet.
 * @param {Iterable<Matrix>} matrices
 */
export function drawVisible(matrices) {
  // First all places, then all pictures: browsers lay the page out once.
  const wanted = [...matrices].filter((matrix) => !matrix.isDrawn && matrix.isOnScreen());
  for (const matrix of wanted) matrix.draw();
}

/**
 * Shows a number beside the pointer; an empty text hides it.
 * @param {string} text
 * @param {number} x
 * @param {number} y
 */
function showTip(text, x, y) {
  const tip = document.getElementById("tip");
  if (!tip) return;
  tip.textContent = text;
  tip.hidden = !text;
  const left = Math.min(x + 12, document.documentElement.clientWidth - tip.offsetWidth - 8);
  tip.style.transform = `translate(${Math.max(left, 4)}px, ${Math.max(y - 34, 4)}px)`;
}

/**
 * What the colours mean.
 * @param {boolean} isShare
 */
export function makeLegend(isShare) {
  const key = isShare ? "legend.share" : "legend.signed";
  const bar = element("i", { "aria-hidden": "true" });
  return element("span", { class: isShare ? "legend share" : "legend signed" }, bar, say(key));
}
