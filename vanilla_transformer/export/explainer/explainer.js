/** What people see: a sentence's way through the model, part by part, and where each number is from. */

/** @import { Answer, Request } from "./explainer-worker.js" */
/** @import { Cell, Explanation } from "./explain.js" */
/** @import { MatrixOptions } from "./matrix.js" */
/** @import { Searched } from "./tracer.js" */
/** @import { Settings } from "./translator.js" */
import { Notebook, PROBABILITIES, SCORE } from "./explain.js";
import { drawVisible, forgetColors, makeLegend, makeThumbnail, Matrix } from "./matrix.js";
import { nameValue, Panel } from "./panel.js";
import { button, canSay, element, find, findLanguage, format, LANGUAGES, loadTexts, say } from "./texts.js";
import { findLargest } from "./tracer.js";
import { COLUMN, findNode, grow, makeTree, readPath } from "./tree.js";

const PATIENCE = 80;  // milliseconds without a key before a sentence is read
const SHOWN_TOKENS = 12;  // of the vocabulary
const DEFAULT_TEXT = "two hundred";
const OF_HEAD = ["query", "key", "value", "scores", "weights", "context"];

const controls = {
  source: find("source", HTMLInputElement), target: find("target", HTMLOutputElement),
  beams: find("beams", HTMLSelectElement), temperature: find("temperature", HTMLInputElement),
  status: find("status", HTMLElement), progress: find("progress", HTMLProgressElement),
};
const panelBody = find("panel-body", HTMLElement), panelBox = find("panel", HTMLElement);

/** @type {Worker} */
let worker;
/** @type {Notebook | undefined} */
export let notebook;
/** @type {Panel} */
let panel;
/** @type {string[]} */
let labels = [];
/** @type {Settings & {languages: [string, string] | null, examples: string[]}} */
let settings;
/** @type {Searched | undefined} */
let searched;
/** What is looked at. */
const view = {
  language: findLanguage(), encoder: { layer: 0, head: 0 }, decoder: { layer: 0, head: 0 }, step: 0,
  hidden: /** @type {number[]} */ ([]),
};
/** @type {Cell[]} The numbers that were explained, the last one now. */
let trail = [];
/** @type {Explanation | undefined} Of the last of them. */
let explained;
/** @type {Map<string, Matrix>} By the names of values, with the head where there is one. */
let matrices = new Map();
let newest = 0, timer = 0, isReady = false, isTracing = false, wantedStep = -1;

/** @param {Request} request */
const ask = (request) => worker.postMessage(request);

/** Reads and translates what is in the box. */
function trace() {
  if (!isReady) return;
  newest += 1;
  isTracing = true;
  const numBeams = Number(controls.beams.value), temperature = Number(controls.temperature.value);
  ask({ type: "trace", id: newest, text: controls.source.value, hidden: view.hidden, numBeams, temperature });
}

/** @param {MessageEvent<Answer>} event */
function listen({ data }) {
  if (data.type === "progress") {
    controls.progress.value = data.loaded / data.total;
    const [loaded, total] = [data.loaded, data.total].map((bytes) => (bytes / 1e6).toFixed(1));
    controls.status.textContent = say("loading.progress", { loaded, total });
  } else if (data.type === "ready") {
    controls.progress.hidden = true;
    controls.status.textContent = "";
    labels = data.labels;
    notebook = new Notebook(data.notes, data.weights, settings.search);
    panel = new Panel({ notebook, labels, onChoose: explain });
    isReady = true;
    trace();
  } else if (data.type === "error") {
    if (data.id !== null && data.id !== newest) return;
    isTracing = false;
    controls.progress.hidden = true;
    controls.status.textContent = data.message;
    controls.status.classList.add("wrong");
  } else if (data.id === newest && notebook) {
    isTracing = false;
    if (data.type === "followed") notebook.setWritten(data.written);
    else if (!takeTraced(data)) return;
    const last = (notebook.written?.tokens.length ?? 1) - 1;
    view.step = wantedStep < 0 ? Math.min(view.step, last) : Math.min(wantedStep, last);
    wantedStep = -1;
    render();
  }
}

/**
 * @param {Answer & {type: "traced"}} answer
 * @returns {boolean}  Whether there is anything to show.
 */
function takeTraced({ traced, milliseconds }) {
  controls.status.classList.remove("wrong");
  find("main", HTMLElement).hidden = !traced;
  controls.target.textContent = "";
  controls.status.textContent = traced ? say("status", { milliseconds: Math.round(milliseconds) }) : say("empty");
  if (!traced || !notebook) return false;
  const isOther = notebook.read?.ids.join() !== traced.read.ids.join();
  notebook.temperature = Number(controls.temperature.value);
  notebook.setRead(traced.read);
  notebook.setWritten(traced.written);
  searched = traced.searched;
  if (traced.read.isCut) controls.status.textContent = say("cut");
  if (isOther) wantedStep = Math.min(1, traced.written.tokens.length - 1);
  trail = trail.filter(isThere);
  return true;
}

/** @param {Cell} cell */
function isThere({ name, index }) {
  if (!notebook?.written) return false;
  const { tokens } = notebook.written;
  if (name === SCORE || name === PROBABILITIES) return index[0] < tokens.length;
  return index.every((each, axis) => each < (notebook?.values[name].dims[axis] ?? 0));
}

/** Shows everything anew. */
function render() {
  if (!notebook?.written) return;
  controls.target.textContent = searched?.best[0].text ?? "";
  matrices = new Map();
  renderTokens();
  renderEmbeddings();
  renderStack("encoder");
  renderSteps();
  renderDecoder();
  renderTree();
  renderPanel();
}

/** What hangs on the step, or on the head that is looked at in the decoder. */
function renderDecoder() {
  renderStack("decoder");
  renderSoftmax();
}

/** @returns {Notebook} */
const book = () => /** @type {Notebook} */ (notebook);
const sourceLabels = () => book().read?.ids.map((id) => labels[id]) ?? [];
const targetLabels = () => book().written?.ids.map((id) => labels[id]) ?? [];

function renderTokens() {
  const { read } = book();
  const chips = (read?.ids ?? []).map((id, place) => {
    const isHidden = !read?.allowed[place];
    const attributes = {
      ...{ class: "chip", "aria-pressed": `${isHidden}`, title: say(isHidden ? "tokens.show" : "tokens.hide") },
      "aria-label": say(isHidden ? "tokens.hidden" : "tokens.shown", { token: labels[id], id, place }),
    };
    return button(attributes, () => {
      const others = view.hidden.filter((each) => each !== place);
      // One token is left to look at.
      const mayHide = !isHidden && others.length < (read?.ids.length ?? 0) - 1;
      view.hidden = mayHide ? [...others, place] : others;
      trace();
    }, element("b", {}, labels[id]), element("small", {}, `${say("tokens.id")} ${id}`));
  });
  keepFocus("tokens-body", chips);
}

/**
 * Puts new children where the old ones were, and the focus on the one in the same place.
 * @param {string} id
 * @param {HTMLElement[]} children
 */
function keepFocus(id, children) {
  const box = find(id, HTMLElement);
  const all = () => [...box.querySelectorAll("button, canvas, [tabindex]")];
  const place = document.activeElement ? all().indexOf(document.activeElement) : -1;
  box.replaceChildren(...children);
  if (place >= 0) /** @type {HTMLElement | undefined} */ (all()[place])?.focus({ preventScroll: true });
}

/** How wide the figures may be. */
const findWidth = () => find("main", HTMLElement).clientWidth - 60;

/**
 * A matrix with its title and what it means.
 * @param {string} name  Of the value.
 * @param {{head?: number, heads?: number, current?: number, rows?: number}} [options]  With `heads`, only the columns
 *     of one head.
 */
function makeFigure(name, { head = -1, heads = 1, current, rows: most } = {}) {
  const { values, notes } = book();
  const { dims } = values[name], last = name.split(".").at(-1) ?? "";
  const isAttention = dims.length === 3;
  const rows = Math.min(most ?? Infinity, dims.at(-2) ?? 0);
  const size = (dims.at(-1) ?? 0) / (isAttention ? 1 : heads), from = isAttention || head < 0 ? 0 : head * size;
  const keysAreSource = name.startsWith("encoder.") || name.includes(".cross.");
  const keyLabels = keysAreSource ? sourceLabels() : targetLabels();
  const columns = isAttention && !keysAreSource ? Math.min(size, rows) : size;
  const cellOf = (/** @type {number} */ row, /** @type {number} */ column) =>
    ({ name, index: isAttention ? [head, row, column] : [row, from + column] });
  const { data } = values[name], stride = dims.at(-1) ?? 0, start = isAttention ? head * (dims[1]) * stride : from;
  const side = book().sideOf(name);
  /** @type {MatrixOptions} */
  const options = {
    title: `${nameValue(name)}${head < 0 ? "" : `, ${say("head", { number: head + 1 })}`}`,
    ...{ rows, columns, cellOf, onChoose: explain, current },
    read: (row, column) => data[start + row * stride + column],
    rowLabels: side === "source" ? sourceLabels() : targetLabels(),
    columnLabels: isAttention ? keyLabels : undefined,
    nameColumn: (column) => say("dimension", { number: from + column }),
    isShare: last === "weights",
  };
  const matrix = new Matrix(options, findWidth());
  matrices.set(name, matrix);
  const key = `about.${notes.steps[name].operation === "norm" ? "norm" : last}`;
  return element("figure", { "data-value": name },
    element("figcaption", {}, element("b", {}, say(`value.${last}`)), " ",
      canSay(key) ? element("span", {}, say(key)) : "", " ", makeLegend(last === "weights")),
    matrix.element);
}

function renderEmbeddings() {
  keepFocus("embeddings-body", findEmbeddings("encoder").map((name) => makeFigure(name)));
}

/**
 * The names of what enters a stack's first layer.
 * @param {"encoder" | "decoder"} side
 */
function findEmbeddings(side) {
  return Object.keys(book().notes.steps).filter((name) => /^\w+\.[a-z]\w*$/.test(name) && name.startsWith(side)
    && !name.endsWith(".norm"));
}

/**
 * Figures that open on demand.
 * @param {string} name
 * @param {string} summary
 * @param {HTMLElement[]} figures
 */
function fold(name, summary, figures) {
  const details = element("details", { "data-details": name }, element("summary", {}, summary),
    element("div", { class: "figures" }, ...figures));
  if (openDetails.has(name)) details.setAttribute("open", "");
  return details;
}

/**
 * Buttons of which one is pressed.
 * @param {string} label
 * @param {HTMLElement[]} children
 */
const group = (label, children) => element("div", { class: "group", role: "group", "aria-label": label }, ...children);

/**
 * Which rows of a stack's values are shown: all of the source, and the target up to the step.
 * @param {"encoder" | "decoder"} side
 */
const findRows = (side) => side === "encoder" ? {} : { rows: view.step + 1, current: view.step };

/** @param {"encoder" | "decoder"} side */
function renderStack(side) {
  const names = Object.keys(book().notes.steps);
  const isStep = (/** @type {string} */ name) => new RegExp(`^${side}\\.\\d+\\.`).test(name);
  const layers = 1 + Math.max(...names.filter(isStep).map((name) => Number(name.split(".")[1])));
  const layerButtons = Array.from({ length: layers }, (_, layer) =>
    button({ "aria-pressed": `${layer === view[side].layer}` }, () => choose(side, { layer }),
      say("layer", { number: layer + 1 })));
  const inLayer = names.filter((name) => name.startsWith(`${side}.${view[side].layer}.`));
  const kinds = [...new Set(inLayer.map((name) => name.split(".")[2]))];
  const blocks = kinds.map((kind) => makeBlock(side, kind, inLayer.filter((name) => name.split(".")[2] === kind)));
  const last = `${side}.norm`;
  if (last in book().notes.steps) blocks.push(element("div", { class: "figures" }, makeFigure(last, findRows(side))));
  const inputs = side === "encoder" ? [] : [fold("decoder.sum", say("decoder.inputs"),
    findEmbeddings(side).map((each) => makeFigure(each, findRows(side))))];
  keepFocus(`${side}-body`, [...inputs, group(say("layers"), layerButtons), ...blocks]);
}

/**
 * Looks at another layer or head.
 * @param {"encoder" | "decoder"} side
 * @param {{layer?: number, head?: number}} chosen
 */
function choose(side, chosen) {
  Object.assign(view[side], chosen);
  renderStack(side);
  frameOperands();
}

/**
 * A part of a layer. What people came for is shown at once: weights, or hidden units. The way to them opens on demand.
 * @param {"encoder" | "decoder"} side
 * @param {string} kind
 * @param {string[]} names  Of its values, in the order in which they are computed.
 */
function makeBlock(side, kind, names) {
  const weights = names.find((name) => name.endsWith(".weights"));
  const heads = weights ? book().values[weights].dims[0] : 1;
  const figures = names.map((name) => {
    const isOfHead = OF_HEAD.includes(name.split(".").at(-1) ?? "");
    const isSource = book().sideOf(name) === "source";
    return makeFigure(name, {
      ...(isOfHead ? { head: view[side].head, heads } : {}), ...(isSource ? {} : findRows(side)),
    });
  });
  const isMain = (/** @type {string} */ name) => name.endsWith(kind === "ffn" ? ".hidden" : ".weights");
  const rest = figures.filter((_, place) => !isMain(names[place]));
  return element("div", { class: "block" },
    element("h3", {}, say(`block.${side}.${kind}`)),
    element("p", {}, say(`block.${side}.${kind}.text`)),
    ...(weights ? [makeGallery(side, kind, weights)] : []),
    element("div", { class: "figures" }, ...figures.filter((_, place) => isMain(names[place]))),
    fold(`${side}.${kind}`, say("details", { count: rest.length }), rest));
}

/**
 * The heads of a layer, small, as buttons.
 * @param {"encoder" | "decoder"} side
 * @param {string} kind
 * @param {string} name  Of their weights.
 */
function makeGallery(side, kind, name) {
  const { dims: [heads, height, width], data } = book().values[name];
  const rows = Math.min(findRows(side).rows ?? height, height);
  const columns = side === "decoder" && kind === "self" ? rows : width;
  return group(say("heads"), Array.from({ length: heads }, (_, head) => {
    const read = (/** @type {number} */ row, /** @type {number} */ column) =>
      data[(head * height + row) * width + column];
    return button({ class: "head", "aria-pressed": `${head === view[side].head}` }, () => choose(side, { head }),
      makeThumbnail({ rows, columns, read }), say("head", { number: head + 1 }));
  }));
}

/** @type {Set<string>} Which of the folded parts are open. */
const openDetails = new Set();
document.addEventListener("toggle", ({ target }) => {
  const name = target instanceof HTMLDetailsElement ? target.dataset.details : undefined;
  if (!name) return;
  if (/** @type {HTMLDetailsElement} */ (target).open) openDetails.add(name); else openDetails.delete(name);
  drawVisible(matrices.values());
}, true);

/** @param {number} step */
function goTo(step) {
  view.step = step;
  renderSteps();
  renderDecoder();
  frameOperands();
}

function renderSteps() {
  const { tokens = [] } = book().written ?? {};
  const chips = tokens.map((token, step) => button(
    { class: step < view.step ? "chip done" : "chip", "aria-pressed": `${step === view.step}`,
      "aria-label": say("steps.go", { step: step + 1, token: labels[token] }) },
    () => goTo(step), element("b", {}, labels[token]), element("small", {}, `${step + 1}`),
  ));
  const move = (/** @type {number} */ by, /** @type {string} */ key) => {
    const made = button({}, () => goTo(view.step + by), say(key));
    if (!(view.step + by in tokens)) made.setAttribute("disabled", "");
    return made;
  };
  const before = book().written?.ids.slice(0, view.step + 1).map((id) => labels[id]).join(" ") ?? "";
  keepFocus("steps", [
    group(say("steps"), [move(-1, "steps.back"), move(1, "steps.on"), ...chips]),
    element("p", { class: "before" }, say("steps.before", { step: view.step + 1, before })),
  ]);
}

function renderSoftmax() {
  const { step } = view;
  const probabilities = book().findProbabilities(step), chosen = book().written?.tokens[step] ?? 0;
  const best = findLargest(probabilities, SHOWN_TOKENS);
  const shown = best.includes(chosen) ? best : [...best.slice(0, -1), chosen];
  const bars = shown.map((token) => {
    const bar = element("i", { class: "bar" });
    bar.style.width = `${100 * probabilities[token]}%`;
    const cell = { name: PROBABILITIES, index: [step, token] };
    const attributes = { class: "number", "aria-label": `${labels[token]}: ${format(probabilities[token])}` };
    return element("li", token === chosen ? { class: "chosen" } : {},
      element("span", { class: "token" }, labels[token]),
      element("span", { class: "track", "aria-hidden": "true" }, bar),
      button(attributes, () => explain(cell), format(probabilities[token])));
  });
  const entropy = -probabilities.reduce((sum, p) => sum + (p > 0 ? p * Math.log2(p) : 0), 0);
  const after = book().written?.ids.slice(0, step + 1).map((id) => labels[id]).join(" ") ?? "";
  keepFocus("softmax-body", [
    element("p", {}, say("softmax.after", { after, temperature: format(book().temperature) })),
    element("ol", { class: "bars" }, ...bars),
    element("p", { class: "quiet" },
      say("softmax.entropy", { entropy: entropy.toFixed(2), words: (2 ** entropy).toFixed(1) })),
  ]);
}

function renderTree() {
  const { nodes = [], best = [] } = searched ?? {};
  const followed = book().written?.tokens ?? [];
  const upTo = followed.slice(0, view.step + 1);
  const onChoose = (/** @type {number} */ place) => {
    if (isTracing) return;  // another sentence is on its way, to which these nodes do not belong
    const path = readPath(nodes, place);
    const step = path.length - 1;
    newest += 1;
    wantedStep = step;
    trail = [...trail, { name: SCORE, index: [step] }];
    showPanel();
    // The rest of the path, where what was chosen lies on the way to the translation that is looked at.
    const isOnWay = path.every((token, each) => token === followed[each]);
    const won = best.find(({ tokens }) => path.every((token, each) => token === tokens[each]));
    ask({ type: "follow", id: newest, tokens: isOnWay ? followed : won?.tokens ?? path });
  };
  const tree = makeTree({ nodes, best: best[0]?.tokens ?? [], followed, labels, onChoose });
  const results = best.map(({ tokens, text }) => {
    const at = findNode(nodes, tokens);
    const score = nodes[at]?.final;
    const act = () => { if (at >= 0) onChoose(at); };
    return element("li", {}, button({}, act, text || "∅"), " ", element("span", { class: "quiet" },
      score === null || score === undefined ? "" : format(score)));
  });
  const box = element("div", { class: "tree", tabindex: 0, role: "region", "aria-label": say("tree.title") }, tree);
  const follow = (/** @type {number} */ x) => { box.scrollLeft = x - box.clientWidth; };
  const growing = button({ id: "grow" }, () => grow(tree, follow), say("tree.grow"));
  keepFocus("beam-body", [
    growing, box, element("p", { class: "quiet" }, say("tree.legend")),
    element("h3", {}, say("tree.found")), element("ol", { class: "found" }, ...results),
  ]);
  const seen = tree.querySelectorAll(".followed").length && findNode(nodes, upTo);
  if (typeof seen === "number" && seen >= 0) box.scrollLeft = Math.max(0, view.step * COLUMN - box.clientWidth / 2);
}

/** @param {Cell} cell */
function explain(cell) {
  trail = [...trail, cell];
  showPanel();
  renderPanel();
}

function showPanel() {
  panelBox.classList.add("open");
}

function renderPanel() {
  const cell = trail.at(-1);
  find("back", HTMLButtonElement).disabled = trail.length < 2;
  const isDimension = cell !== undefined && cell.name !== PROBABILITIES && cell.name !== SCORE;
  for (const id of ["previous", "next"]) find(id, HTMLButtonElement).disabled = !isDimension;
  explained = cell && isThere(cell) ? book().explain(cell) : undefined;
  if (!cell || !explained) {
    panelBody.replaceChildren(element("p", {}, say("panel.empty")));
  } else {
    const hadFocus = panelBody.contains(document.activeElement);
    panelBody.replaceChildren(...panel.render(explained));
    panelBox.scrollTop = 0;
    if (hadFocus) find("panel-title", HTMLElement).focus({ preventScroll: true });
    const { value } = explained;
    find("told", HTMLElement).textContent = `${nameValue(cell.name)}, ${panel.describePlace(cell)}: ${format(value)}`;
  }
  frameOperands();
}

/** Frames the number that is explained, and those it was computed from, wherever they are shown. */
function frameOperands() {
  /** @type {Map<string, number[][]>} */
  const places = new Map([...matrices.keys()].map((name) => [name, []]));
  const add = (/** @type {Cell | undefined} */ each) => {
    if (each) places.get(each.name)?.push(each.index);
  };
  if (explained) {
    const { cell, terms, parts } = explained;
    add(cell);
    for (const { factors } of terms) for (const each of factors) add(each.cell);
    for (const part of Object.values(parts)) add(part.cell);
  }
  for (const [name, matrix] of matrices) {
    const { rows, columns } = matrix.options;
    const first = matrix.options.cellOf(0, 0).index;
    const ofHead = (places.get(name) ?? []).filter((index) => index.length < 3 || index[0] === first[0]);
    const [y, x] = [-2, -1].map((axis) => ofHead.map((index) => (index.at(axis) ?? 0) - (first.at(axis) ?? 0)));
    const [top, left, bottom, right] = [Math.min(...y), Math.min(...x), Math.max(...y), Math.max(...x)];
    const isSeen = ofHead.length && top >= 0 && left >= 0 && top < rows && left < columns;
    matrix.frame(isSeen ? [[top, Math.min(bottom, rows - 1), left, Math.min(right, columns - 1)]] : []);
  }
  drawVisible(matrices.values());
}

/** @param {number} by */
function moveOn(by) {
  const cell = trail.at(-1);
  if (!cell) return;
  const index = [...cell.index.slice(0, -1), (cell.index.at(-1) ?? 0) + by];
  const next = { ...cell, index };
  if (index.at(-1) === -1 || !isThere(next)) return;
  trail = [...trail.slice(0, -1), next];
  renderPanel();
}

/** @param {string} language */
async function speak(language) {
  view.language = language;
  await loadTexts(language);
  for (const each of document.querySelectorAll("[data-language]")) {
    each.setAttribute("aria-pressed", `${each.getAttribute("data-language") === language}`);
  }
  document.title = say("title");
  controls.status.textContent = "";
  render();
  if (isReady) renderPanel(); else panelBody.replaceChildren(element("p", {}, say("panel.empty")));
}

/** Lets the service worker see what is loaded from now on; without one the page works online. */
async function keepFiles() {
  const { serviceWorker } = navigator;
  if (!serviceWorker) return;
  const claimed = new Promise((resolve) => serviceWorker.addEventListener("controllerchange", resolve, { once: true }));
  try {
    await serviceWorker.register("service-worker.js");
    if (!serviceWorker.controller) await Promise.race([claimed, new Promise((resolve) => setTimeout(resolve, 3000))]);
  } catch (error) {
    console.info(`Nothing is kept for visits without a network: ${error}`);
  }
}

async function start() {
  const response = await fetch("settings.json");
  if (!response.ok) throw new Error(`settings.json could not be loaded (${response.status}).`);
  settings = await response.json();
  const { examples, languages, search } = settings;
  controls.source.value = examples[0] ?? DEFAULT_TEXT;
  if (languages) [controls.source.lang, controls.target.lang] = languages;
  const isKnown = [...controls.beams.options].some((option) => Number(option.value) === search.num_beams);
  controls.beams.value = `${isKnown ? search.num_beams : 4}`;
  find("examples", HTMLElement).append(...examples.map((example) => button({ lang: languages?.[0] ?? "" }, () => {
    controls.source.value = example;
    view.hidden = [];
    trace();
  }, example)));
  await speak(view.language);
  await keepFiles();
  worker = new Worker("explainer-worker.js", { type: "module" });
  worker.addEventListener("message", listen);
  worker.addEventListener("error", ({ message }) => {
    controls.status.textContent = say("broken", { message: message ?? "" });
    controls.status.classList.add("wrong");
  });
}

controls.source.addEventListener("input", () => {
  view.hidden = [];
  clearTimeout(timer);
  timer = setTimeout(trace, PATIENCE);
});
controls.beams.addEventListener("change", trace);
controls.temperature.addEventListener("input", () => {
  find("temperature-shown", HTMLOutputElement).textContent = controls.temperature.value;
  if (!notebook?.written) return;
  notebook.temperature = Number(controls.temperature.value);
  renderSoftmax();
  renderPanel();
  clearTimeout(timer);
  timer = setTimeout(trace, PATIENCE);
});
find("controls", HTMLFormElement).addEventListener("submit", (event) => event.preventDefault());
for (const each of document.querySelectorAll("[data-language]")) {
  each.addEventListener("click", () => speak(each.getAttribute("data-language") ?? LANGUAGES[0]));
}
find("back", HTMLButtonElement).addEventListener("click", () => {
  trail = trail.slice(0, -1);
  renderPanel();
});
find("previous", HTMLButtonElement).addEventListener("click", () => moveOn(-1));
find("next", HTMLButtonElement).addEventListener("click", () => moveOn(1));
const close = () => {
  panelBox.classList.remove("open");
  trail = [];
  if (isReady) renderPanel();
};
find("close", HTMLButtonElement).addEventListener("click", close);
document.addEventListener("keydown", ({ key }) => { if (key === "Escape") close(); });
document.addEventListener("scroll", () => drawVisible(matrices.values()), { passive: true });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  forgetColors();
  render();
});
let width = 0;
new ResizeObserver(() => {
  if (Math.abs(findWidth() - width) < 2 || !notebook?.written) return;
  width = findWidth();
  render();
}).observe(find("main", HTMLElement));
start().catch((error) => {
  controls.progress.hidden = true;
  controls.status.textContent = `${error.message ?? error}`;
  controls.status.classList.add("wrong");
});
