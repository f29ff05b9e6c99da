/** What each number was computed from: the very values and weights, by the notes of recording.py. */

/** @import { Read, Values, Written } from "./tracer.js" */
import { LENGTH_PENALTIES } from "./search.js";
import { logSoftmax } from "./tracer.js";

/**
 * @typedef {object} Step  How a value is computed.
 * @property {"embedding" | "positions" | "sum" | "linear" | "scores" | "softmax" | "context" | "norm" | "activation"
 *     } operation
 * @property {string[]} of  Names of the values that it is computed from.
 * @property {string} [weight]
 * @property {string | null} [bias]
 * @property {number} [scale]
 * @property {number} [heads]
 * @property {"source" | "causal"} [mask]
 * @property {number} [eps]
 * @property {string} [function]
 * @property {number} [offset]  The index of the first position.
 * @property {number[]} [rates]  What each dimension of sinusoids turns by, in radians for each position.
 * @property {boolean[]} [is_cosine]
 */

/** @typedef {{offset: number, shape: number[], turned: boolean}} WeightPlace  `turned`: columns lie side by side. */
/** @typedef {{steps: Record<string, Step>, weights: Record<string, WeightPlace>, output: string}} Notes */

/** @typedef {{name: string, index: number[]}} Cell  A number: (position, dimension), or (head, query, key). */

/**
 * @typedef {object} Factor  A number that was used.
 * @property {number} value
 * @property {Cell} [cell]  Where it is from, unless it is a weight.
 * @property {string} [weight]  The weight's name, with its place.
 */

/** @typedef {{factors: Factor[], value: number, place: number, isHidden?: boolean}} Term  A row of the sum. */

/**
 * @typedef {object} Explanation
 * @property {Cell} cell
 * @property {number} value  What the model computed.
 * @property {number} computed  The same, computed from the terms and parts.
 * @property {Step["operation"] | "probability" | "score"} operation
 * @property {Term[]} terms
 * @property {Record<string, Factor>} parts  The other numbers, by their names in the texts.
 * @property {string} [function]
 * @property {"key" | "dimension" | "token" | "step" | "none"} over  What the terms are counted by.
 */

/** Names of what the page computes itself: the softmax over the vocabulary, and a translation's score. */
export const PROBABILITIES = "probabilities", SCORE = "score";

/** @type {Record<string, (x: number) => number>} Those whose formula is shown; of others, only the result. */
export const ACTIVATIONS = { relu: (x) => Math.max(0, x), tanh: Math.tanh, silu: (x) => x / (1 + Math.exp(-x)) };

const sum = (/** @type {number[]} */ numbers) => numbers.reduce((total, number) => total + number, 0);

/** The values of a sentence and of its translation, and the weights. */
export class Notebook {
  /**
   * @param {Notes} notes
   * @param {ArrayBuffer} weights
   * @param {{length_penalty: number, length_penalty_type: "gnmt" | "transformers"}} search
   */
  constructor(notes, weights, search) {
    this.notes = notes;
    this.weights = weights;
    this.search = search;
    this.temperature = 1;
    /** @type {Values} */
    this.values = {};
    /** @type {Read | null} */
    this.read = null;
    /** @type {Written | null} */
    this.written = null;
  }

  /** @param {Read} read */
  setRead(read) {
    this.read = read;
    this.values = { ...this.values, ...read.values };
  }

  /** @param {Written} written */
  setWritten(written) {
    this.written = written;
    this.values = { ...this.values, ...written.values };
  }

  /**
   * The weight of a name, at a place.
   * @param {string} name
   * @param {...number} index
   * @returns {Factor}
   */
  takeWeight(name, ...index) {
    const { offset, shape, turned } = this.notes.weights[name];
    const data = new Float32Array(this.weights, offset, shape.reduce((size, each) => size * each, 1));
    const [row, column] = index;
    const place = index.length === 1 ? row : turned ? column * shape[0] + row : row * shape[1] + column;
    return { value: data[place], weight: `${name}[${index.join(", ")}]` };
  }

  /**
   * A number that the model computed.
   * @param {string} name
   * @param {...number} index
   * @returns {Factor}
   */
  take(name, ...index) {
    if (name === PROBABILITIES) return { value: this.findProbabilities(index[0])[index[1]], cell: { name, index } };
    if (name === SCORE) return { value: this.explainScore(index[0]).value, cell: { name, index } };
    const { dims, data } = this.values[name];
    const place = index.reduce((before, each, axis) => before * dims[axis] + each, 0);
    return { value: data[place], cell: { name, index } };
  }

  /**
   * A row of a value: what `take` gives, for each of its columns from one on.
   * @param {string} name
   * @param {number[]} row
   * @param {number} from
   * @param {number} count
   */
  takeRow(name, row, from, count) {
    return Array.from({ length: count }, (_, column) => this.take(name, ...row, from + column));
  }

  /**
   * The softmax over the vocabulary at a step, with the temperature.
   * @param {number} step
   */
  findProbabilities(step) {
    return logSoftmax(this.takeLogits(step), this.temperature).map(Math.exp);
  }

  /** @param {number} step */
  takeLogits(step) {
    const { dims: [, size], data } = this.values.logits;
    return data.subarray(step * size, (step + 1) * size);
  }

  /**
   * Which side a value belongs to.
   * @param {string} name
   * @returns {"source" | "target"}
   */
  sideOf(name) {
    // The keys and values that the decoder looks up are the source's.
    return name.startsWith("encoder.") || /cross\.(key|value)$/.test(name) ? "source" : "target";
  }

  /**
   * The number of a token among those that count.
   * @param {string} name
   * @param {number} place
   */
  findPosition(name, place) {
    if (this.sideOf(name) === "target" || !this.read) return place;
    return Math.max(this.read.allowed.slice(0, place + 1).filter(Boolean).length - 1, 0);
  }

  /**
   * @param {Cell} cell
   * @returns {Explanation}
   */
  explain(cell) {
    if (cell.name === PROBABILITIES) return this.explainProbability(cell.index);
    if (cell.name === SCORE) return this.explainScore(cell.index[0]);
    const step = this.notes.steps[cell.name];
    const { value } = this.take(cell.name, ...cell.index);
    const found = this[step.operation](step, cell);
    return { cell, value, operation: step.operation, ...found };
  }

  /**
   * @param {Factor[][]} rows
   * @returns {Term[]}
   */
  multiply(rows) {
    const product = (/** @type {Factor[]} */ factors) => factors.reduce((all, { value }) => all * value, 1);
    return rows.map((factors, place) => ({ factors, place, value: product(factors) }));
  }

  /**
   * @param {Step} step
   * @param {Cell} cell
   */
  embedding(step, { name, index: [position, dimension] }) {
    const side = this.sideOf(name) === "source" ? this.read : this.written;
    const entry = this.takeWeight(/** @type {string} */ (step.weight), side?.ids[position] ?? 0, dimension);
    const scale = { value: step.scale ?? 1 };
    const computed = entry.value * scale.value;
    return { terms: [], parts: { entry, scale }, computed, over: /** @type {const} */ ("none") };
  }

  /**
   * @param {Step} step
   * @param {Cell} cell
   */
  positions(step, { name, index: [place, dimension] }) {
    const position = this.findPosition(name, place) + (step.offset ?? 0);
    const none = { terms: [], over: /** @type {const} */ ("none") };
    if (step.weight) {
      const entry = this.takeWeight(step.weight, position, dimension);
      return { ...none, parts: { position: { value: position }, entry }, computed: entry.value };
    }
    const rate = step.rates?.[dimension] ?? 0, angle = position * rate;
    const parts = { position: { value: position }, rate: { value: rate }, angle: { value: angle } };
    const isCosine = step.is_cosine?.[dimension] ?? false;
    const computed = isCosine ? Math.cos(angle) : Math.sin(angle);
    return { ...none, parts, computed, function: isCosine ? "cos" : "sin" };
  }

  /**
   * @param {Step} step
   * @param {Cell} cell
   */
  sum(step, { index }) {
    const terms = this.multiply(step.of.map((name) => [this.take(name, ...index)]));
    return { terms, parts: {}, computed: sum(terms.map(({ value }) => value)), over: /** @type {const} */ ("none") };
  }

  /**
   * @param {Step} step
   * @param {Cell} cell
   */
  linear(step, { index: [position, output] }) {
    const weight = /** @type {string} */ (step.weight);
    const count = this.notes.weights[weight].shape[1];
    const inputs = this.takeRow(step.of[0], [position], 0, count);
    const terms = this.multiply(inputs.map((input, place) => [input, this.takeWeight(weight, output, place)]));
    const total = sum(terms.map(({ value }) => value));
    /** @type {Record<string, Factor>} */
    const parts = { total: { value: total } };
    if (step.bias) parts.bias = this.takeWeight(step.bias, output);
    return { terms, parts, computed: total + (parts.bias?.value ?? 0), over: /** @type {const} */ ("dimension") };
  }

  /**
   * @param {Step} step
   * @param {Cell} cell
   */
  scores(step, { index: [head, from, to] }) {
    const [query, key] = step.of;
    const size = this.values[query].dims[1] / (step.heads ?? 1);
    const [q, k] = [[query, from], [key, to]].map(([name, place]) =>
      this.takeRow(/** @type {string} */ (name), [/** @type {number} */ (place)], head * size, size));
    const terms = this.multiply(q.map((factor, place) => [factor, k[place]]));
    const total = sum(terms.map(({ value }) => value)), scale = step.scale ?? 1;
    const parts = { total: { value: total }, scale: { value: scale } };
    return { terms, parts, computed: total * scale, over: /** @type {const} */ ("dimension") };
  }

  /**
   * @param {Step} step
   * @param {Cell} cell
   */
  softmax(step, { name, index: [head, from, to] }) {
    const scores = this.takeRow(step.of[0], [head, from], 0, this.values[name].dims[2]);
    const isHidden = (/** @type {number} */ key) =>
      step.mask === "causal" ? key > from : this.read?.allowed[key] === false;
    const largest = Math.max(...scores.filter((_, key) => !isHidden(key)).map(({ value }) => value));
    const terms = scores.map((score, place) => {
      const value = isHidden(place) ? 0 : Math.exp(score.value - largest);
      return { factors: [score], value, place, isHidden: isHidden(place) };
    });
    const total = sum(terms.map(({ value }) => value));
    const parts = { largest: { value: largest }, exp: { value: terms[to].value }, total: { value: total } };
    return { terms, parts, computed: terms[to].value / total, over: /** @type {const} */ ("key") };
  }

  /**
   * @param {Step} step
   * @param {Cell} cell
   */
  context(step, { index: [position, dimension] }) {
    const [weights, value] = step.of;
    const head = Math.floor(dimension / (this.values[value].dims[1] / (step.heads ?? 1)));
    const shares = this.takeRow(weights, [head, position], 0, this.values[weights].dims[2]);
    const terms = this.multiply(shares.map((share, key) => [share, this.take(value, key, dimension)]));
    return { terms, parts: {}, computed: sum(terms.map(({ value }) => value)), over: /** @type {const} */ ("key") };
  }

  /**
   * @param {Step} step
   * @param {Cell} cell
   */
  norm(step, { name, index: [position, dimension] }) {
    const inputs = this.takeRow(step.of[0], [position], 0, this.values[name].dims[1]);
    const mean = sum(inputs.map(({ value }) => value)) / inputs.length;
    const variance = sum(inputs.map(({ value }) => (value - mean) ** 2)) / inputs.length;
    const input = inputs[dimension], eps = step.eps ?? 0;
    const normal = (input.value - mean) / Math.sqrt(variance + eps);
    const gain = this.takeWeight(/** @type {string} */ (step.weight), dimension);
    const parts = {
      ...{ input, mean: { value: mean }, variance: { value: variance }, eps: { value: eps } },
      ...{ normal: { value: normal }, gain, bias: step.bias ? this.takeWeight(step.bias, dimension) : { value: 0 } },
    };
    const terms = this.multiply(inputs.map((each) => [each]));
    return { terms, parts, computed: normal * gain.value + parts.bias.value, over: /** @type {const} */ ("dimension") };
  }

  /**
   * @param {Step} step
   * @param {Cell} cell
   */
  activation(step, { name, index }) {
    const input = this.take(step.of[0], ...index);
    const known = ACTIVATIONS[step.function ?? ""];
    const computed = known ? known(input.value) : this.take(name, ...index).value;
    return { terms: [], parts: { input }, computed, function: step.function, over: /** @type {const} */ ("none") };
  }

  /**
   * @param {number[]} index
   * @returns {Explanation}
   */
  explainProbability([step, token]) {
    const logits = this.takeLogits(step), probabilities = this.findProbabilities(step);
    const largest = logits.reduce((a, b) => Math.max(a, b));
    const factor = (/** @type {number} */ place) => this.take("logits", step, place);
    const terms = [...logits.keys()].map((place) => {
      const value = Math.exp((logits[place] - largest) / this.temperature);
      return { factors: [factor(place)], value, place };
    });
    const total = sum(terms.map(({ value }) => value)), exp = terms[token].value;
    const parts = {
      ...{ logit: factor(token), largest: { value: largest }, temperature: { value: this.temperature } },
      ...{ exp: { value: exp }, total: { value: total } },
    };
    const cell = { name: PROBABILITIES, index: [step, token] };
    const value = probabilities[token];
    return { cell, value, computed: exp / total, operation: "probability", terms, parts, over: "token" };
  }

  /**
   * The score of the translation up to a step: the sum of its tokens' log-probabilities; at its end, with the penalty.
   * @param {number} step
   * @returns {Explanation}
   */
  explainScore(step) {
    const tokens = this.written?.tokens.slice(0, step + 1) ?? [];
    const terms = tokens.map((token, place) => {
      const factor = this.take(PROBABILITIES, place, token);
      return { factors: [factor], value: Math.log(factor.value), place };
    });
    const total = sum(terms.map(({ value }) => value));
    const { length_penalty: alpha, length_penalty_type: kind } = this.search;
    const penalty = LENGTH_PENALTIES[kind](tokens.length, alpha);
    const parts = { total: { value: total }, length: { value: tokens.length }, alpha: { value: alpha } };
    const cell = { name: SCORE, index: [step] };
    return {
      ...{ cell, value: total, computed: total, operation: "score", terms, over: "step" },
      parts: { ...parts, penalty: { value: penalty }, final: { value: total / penalty } },
    };
  }
}
