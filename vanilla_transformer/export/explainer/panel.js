/** The explanation of a number: what it is, the formula with the numbers put in, and what was summed. */

/** @import { Cell, Explanation, Factor, Notebook, Term } from "./explain.js" */
import { ACTIVATIONS, PROBABILITIES, SCORE } from "./explain.js";
import { button, element, format, say } from "./texts.js";

const SHOWN = 12;  // rows of a sum, unless all are asked for

/**
 * @typedef {object} PanelOptions
 * @property {Notebook} notebook
 * @property {string[]} labels  Of all tokens.
 * @property {(cell: Cell) => void} onChoose
 */

/**
 * What a value is called.
 * @param {string} name
 */
export function nameValue(name) {
  if (name === PROBABILITIES || name === SCORE || name === "logits") return say(`value.${name}`);
  const [side, ...rest] = name.split(".");
  const parts = [say(`side.${side}`)];
  if (rest.length > 1) parts.push(say("layer", { number: Number(rest[0]) + 1 }), say(`block.${side}.${rest[1]}`));
  return [...parts, say(`value.${rest.at(-1)}`)].join(" › ");
}

/** Draws explanations. */
export class Panel {
  /** @param {PanelOptions} options */
  constructor(options) {
    this.options = options;
  }

  /**
   * @param {"source" | "target"} side
   * @param {number} place
   */
  nameToken(side, place) {
    const { notebook: { read, written }, labels } = this.options;
    const ids = side === "source" ? read?.ids : written?.ids;
    return `“${labels[ids?.[place] ?? 0]}”`;
  }

  /**
   * Where a number stands.
   * @param {Cell} cell
   */
  describePlace({ name, index }) {
    const { notebook, labels } = this.options;
    const side = notebook.sideOf(name);
    if (name === SCORE) {
      const token = `“${labels[notebook.written?.tokens[index[0]] ?? 0]}”`;
      return say("place.score", { count: index[0] + 1, token });
    }
    if (name === "logits" || name === PROBABILITIES) {
      return say("place.next", { token: `“${labels[index[1]]}”`, after: this.nameToken("target", index[0]) });
    }
    if (/\.(scores|weights)$/.test(name)) {
      const keySide = name.startsWith("encoder.") || name.includes(".cross.") ? "source" : "target";
      const [head, from, to] = index;
      const tokens = { from: this.nameToken(side, from), to: this.nameToken(keySide, to) };
      return say("place.attention", { head: head + 1, ...tokens });
    }
    return say("place.dimension", { token: this.nameToken(side, index[0]), dimension: index[1] });
  }

  /**
   * A number that was used: a button, if it was computed.
   * @param {Factor} factor
   */
  show({ value, cell, weight }) {
    if (!cell) return element("span", { class: "number", ...(weight ? { title: weight } : {}) }, format(value));
    const title = `${nameValue(cell.name)} · ${this.describePlace(cell)}`;
    const act = () => this.options.onChoose(cell);
    return button({ class: "number", title, "aria-label": `${format(value)}: ${title}` }, act, format(value));
  }

  /**
   * @param {Explanation} explanation
   * @returns {Node[]}
   */
  render(explanation) {
    const { cell, value, operation } = explanation;
    return [
      element("p", { class: "of" }, nameValue(cell.name)),
      element("h2", { id: "panel-title", tabindex: -1 }, this.describePlace(cell)),
      element("p", { class: "result", "data-value": value }, format(value)),
      element("p", {}, say(`operation.${operation}`)),
      ...this.writeEquations(explanation).map((parts) => element("p", { class: "equation" }, ...parts)),
      ...(explanation.terms.length ? [this.makeTable(explanation)] : []),
      ...this.renderOrigin(explanation),
    ];
  }

  /**
   * Where a weight's score is from, or what entered an activation function: what people ask next.
   * @param {Explanation} of
   * @returns {Node[]}
   */
  renderOrigin({ operation, cell, terms, parts }) {
    const origin = operation === "softmax" ? terms[cell.index[2]].factors[0].cell
      : operation === "activation" ? parts.input.cell : undefined;
    if (!origin) return [];
    const explanation = this.options.notebook.explain(origin);
    return [
      element("h3", {}, nameValue(origin.name)),
      ...this.writeEquations(explanation).map((parts) => element("p", { class: "equation" }, ...parts)),
      this.makeTable(explanation),
    ];
  }

  /**
   * @param {Explanation} explanation
   * @returns {(Node | string)[][]}
   */
  writeEquations({ cell, operation, parts, computed, terms, function: name }) {
    const n = Object.fromEntries(Object.entries(parts).map(([key, part]) => [key, this.show(part)]));
    const copy = (/** @type {string} */ key) => this.show(parts[key]);
    const result = element("b", { class: "number computed", "data-value": computed }, format(computed));
    switch (operation) {
      case "embedding":
        return [["E[", say("the.id"), "] × √d", sub("model"), " = ", n.entry, " × ", n.scale, " = ", result]];
      case "positions":
        if (n.entry) return [["P[", n.position, "] = ", result]];
        return [[`${say("angle")} = `, n.position, " × ", n.rate, " = ", n.angle],
          [`${name}(`, copy("angle"), ") = ", result]];
      case "sum": return [[this.show(terms[0].factors[0]), " + ", this.show(terms[1].factors[0]), " = ", result]];
      case "linear":
        return n.bias
          ? [["Σ x", sub("i"), " · w", sub("i"), " = ", n.total], [copy("total"), " + b ", n.bias, " = ", result]]
          : [["Σ x", sub("i"), " · w", sub("i"), " = ", result]];
      case "scores":
        return [["q · k = Σ q", sub("i"), " k", sub("i"), " = ", n.total],
          ["q · k / √d", sub("k"), " = ", copy("total"), " × ", n.scale, " = ", result]];
      case "softmax":
        return [["exp(s − max) = exp(", this.show(terms[cell.index[2]].factors[0]), " − ", n.largest, ") = ", n.exp],
          ["Σ exp = ", n.total], [copy("exp"), " / ", copy("total"), " = ", result]];
      case "context": return [["Σ α", sub("j"), " · v", sub("j"), " = ", result]];
      case "norm":
        return [["μ = ", n.mean, ", σ² = ", n.variance],
          ["z = (x − μ) / √(σ² + ε)"],
          ["= (", n.input, " − ", copy("mean"), ") / √(", copy("variance"), " + ", n.eps, ") = ", n.normal],
          ["z · γ + β = ", copy("normal"), " × ", n.gain, " + ", n.bias, " = ", result]];
      case "activation":
        return name === "relu" ? [["max(0, ", n.input, ") = ", result]] : [[`${name}(`, n.input, ") = ", result],
          ...(name && name in ACTIVATIONS ? [] : [[say("unknown.function")]])];
      case "probability":
        return [["exp((z − max) / T) = exp((", n.logit, " − ", n.largest, ") / ", n.temperature, ") = ", n.exp],
          ["Σ exp = ", n.total], [copy("exp"), " / ", copy("total"), " = ", result]];
      default:
        return [["Σ ln p = ", result],
          [`${say("penalty")} = `, n.penalty, " (α = ", n.alpha, ", |Y| = ", n.length, ")"],
          [copy("total"), " / ", copy("penalty"), " = ", n.final]];
    }
  }

  /** @param {Explanation} explanation */
  makeTable(explanation) {
    const { operation, terms, cell, over } = explanation;
    const isLargestFirst = ["linear", "scores", "probability"].includes(operation);
    const sorted = isLargestFirst ? [...terms].sort((a, b) => Math.abs(b.value) - Math.abs(a.value)) : terms;
    const shown = sorted.length <= SHOWN + 3 ? sorted : sorted.slice(0, SHOWN);
    const heads = say(`columns.${operation}`).split("|");
    const head = element("tr", {}, element("th", { scope: "col" }, say(`over.${over}`)),
      ...heads.map((each) => element("th", { scope: "col" }, each)));
    const body = element("tbody", {}, ...shown.map((term) => this.makeRow(explanation, term)));
    const table = element("table", {}, element("caption", {}, say(isLargestFirst ? "table.largest" : "table.all")),
      element("thead", {}, head), body);
    const box = element("div", { class: "terms", "data-cell": cell.name }, table);
    if (shown.length < sorted.length) {
      const more = button({ class: "more" }, () => {
        body.append(...sorted.slice(SHOWN).map((term) => this.makeRow(explanation, term)));
        more.remove();
      }, say("table.more", { count: sorted.length }));
      box.append(more);
    }
    return box;
  }

  /**
   * @param {Explanation} explanation
   * @param {Term} term
   */
  makeRow({ operation, parts, cell, over }, { factors, value, place, isHidden }) {
    const keySide = cell.name.startsWith("encoder.") || cell.name.includes(".cross.") ? "source" : "target";
    const { labels, notebook } = this.options;
    /** @type {Record<Explanation["over"], () => string>} */
    const names = {
      none: () => nameValue(factors[0].cell?.name ?? ""),
      dimension: () => `${place}`,
      key: () => this.nameToken(keySide, place),
      token: () => `“${labels[place]}”`,
      step: () => `“${labels[notebook.written?.tokens[place] ?? 0]}”`,
    };
    const cells = factors.map((factor) => element("td", {}, this.show(factor)));
    const number = (/** @type {number} */ each) => element("td", {}, format(each));
    if (isHidden) cells.push(element("td", { colspan: 2 }, say("hidden")));
    else if (operation === "softmax" || operation === "probability") {
      cells.push(number(value), number(value / parts.total.value));
    } else if (factors.length > 1 || operation === "score") cells.push(number(value));
    const isOwn = { softmax: cell.index[2], norm: cell.index[1], probability: cell.index[1] }[
      /** @type {string} */ (operation)] === place;
    return element("tr", isOwn ? { class: "own" } : {}, element("th", { scope: "row" }, names[over]()), ...cells);
  }
}

/** @param {string} text */
function sub(text) {
  return element("sub", {}, text);
}
