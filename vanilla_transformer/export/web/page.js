/** What people see: the texts, the translations while they type, and how far loading is. */

/** @import { Answer } from "./worker.js" */
/** @import { Result, Settings } from "./translator.js" */

const MOST_SHOWN = 5;  // translations of a line
const PATIENCE = 60;  // milliseconds without a key before a text is translated
const CLAIM = 3000;  // milliseconds that a service worker has to begin

/**
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} kind
 * @returns {T}
 */
function find(id, kind) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`The page lacks #${id}.`);
  return found;
}

const source = find("source", HTMLTextAreaElement), target = find("target", HTMLOutputElement);
const beams = find("beams", HTMLSelectElement), progress = find("progress", HTMLProgressElement);
const told = find("status", HTMLElement);
const others = find("others", HTMLElement), nBest = find("n-best", HTMLOListElement);
const clear = find("clear", HTMLButtonElement), copy = find("copy", HTMLButtonElement);

/** @type {Map<string, Result>} What was translated with these beams. */
let known = new Map();
/** @type {string[]} The lines on their way. */
let asked = [];
/** @type {Worker | undefined} */
let worker;
let newest = 0, isReady = false, timer = 0, ready = "";

const readLines = () => source.value.split("\n");
const findActiveLine = () => source.value.slice(0, source.selectionStart).split("\n").length - 1;

/**
 * @param {string} name
 * @param {Record<string, string>} attributes
 * @param {...(Node | string)} children
 */
function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** @param {string} text */
function say(text, isWrong = false) {
  told.textContent = text;
  told.classList.toggle("wrong", isWrong);
}

/** Shows what is known; a line that is not yet translated keeps what stood there. */
function show() {
  const lines = readLines(), active = findActiveLine();
  const before = [...target.children].map((line) => line.cloneNode(true));
  const isWhole = lines.every((line) => known.has(line) || !line.trim());
  target.replaceChildren(...lines.map((line, place) => {
    const result = known.get(line);
    if (!result && line.trim() && before[place]) return before[place];
    const made = element("span", { class: "line" }, result?.translations[0]?.text ?? "");
    if (result?.isCut) made.append(" ", element("span", { class: "note" }, "(too long: its end is not translated)"));
    return made;
  }));
  [...target.children].forEach((line, place) => line.classList.toggle("active", lines.length > 1 && place === active));
  target.classList.toggle("stale", !isWhole);
  clear.hidden = !source.value;
  copy.hidden = !source.value.trim();
  showOthers(known.get(lines[active]), lines.length > 1 ? `of line ${active + 1}` : "");
}

/**
 * @param {Result | undefined} result
 * @param {string} where
 */
function showOthers(result, where) {
  const rest = result?.translations.slice(1) ?? [];
  others.hidden = !rest.length;
  find("others-line", HTMLElement).textContent = where;
  const first = result?.translations[0];
  nBest.replaceChildren(...rest.map(({ text, score }) => {
    // How likely it is beside the best one, by the score that chose between them.
    const share = first ? Math.exp(score - first.score) : 0;
    const shown = `${Math.round(100 * share)}%`;
    const title = `score ${score.toFixed(3)}; the best has ${first?.score.toFixed(3)}`;
    return element("li", {}, element("bdi", {}, text), element("span", { class: "score", title }, shown));
  }));
}

/** Asks for the lines that are not known yet. */
function ask() {
  asked = [...new Set(readLines())].filter((line) => line.trim() && !known.has(line));
  show();
  if (!isReady || !asked.length) return;
  const numBeams = Number(beams.value);
  newest += 1;
  const numWanted = Math.min(numBeams, MOST_SHOWN);
  worker?.postMessage({ type: "translate", id: newest, texts: asked, numBeams, numWanted });
}

function askSoon() {
  clearTimeout(timer);
  timer = setTimeout(ask, PATIENCE);
  show();
}

/** @param {MessageEvent<Answer>} event */
function listen({ data }) {
  if (data.type === "progress") {
    progress.value = data.loaded / data.total;
    const [loaded, total] = [data.loaded, data.total].map((bytes) => (bytes / 1e6).toFixed(1));
    say(data.loaded < data.total ? `Loading: ${loaded} of ${total} MB` : "Starting …");
  } else if (data.type === "ready") {
    isReady = true;
    progress.hidden = true;
    ready = data.threads > 1 ? `Ready, ${data.threads} threads` : "Ready";
    say(ready);
    ask();
  } else if (data.type === "error") {
    if (data.id !== null && data.id !== newest) return;
    progress.hidden = true;
    say(data.message, true);
  } else if (data.id === newest) {
    if (data.type === "result") {
      known.set(asked[data.index], data.result);
      show();
    } else {
      const seconds = data.milliseconds / 1000;
      const time = seconds < 1 ? `${Math.round(data.milliseconds)} ms` : `${seconds.toFixed(1)} s`;
      say(`${data.tokens} tokens in ${time}`);
    }
  }
}

/** Lets the service worker see what is loaded from now on; without one, as in some private windows, it works online. */
async function keepFiles() {
  const { serviceWorker } = navigator;
  if (!serviceWorker) return;
  const claimed = new Promise((resolve) => serviceWorker.addEventListener("controllerchange", resolve, { once: true }));
  try {
    await serviceWorker.register("service-worker.js");
    if (!serviceWorker.controller) await Promise.race([claimed, new Promise((resolve) => setTimeout(resolve, CLAIM))]);
  } catch (error) {
    console.info(`Nothing is kept for visits without a network: ${error}`);
  }
}

/** @param {Settings & {title: string, languages: [string, string] | null, examples: string[]}} settings */
function describe({ languages, examples, search }) {
  if (languages) {
    const names = new Intl.DisplayNames([navigator.language, "en"], { type: "language", fallback: "code" });
    const name = (/** @type {string} */ code) => {
      try {
        return names.of(code) ?? code;
      } catch {
        return code;
      }
    };
    const [from, to] = languages.map(name);
    const arrow = element("span", { class: "arrow", role: "img", "aria-label": "to" }, "→");
    find("title", HTMLElement).replaceChildren(from, arrow, to);
    document.title = `${from} → ${to}`;
    find("source-label", HTMLElement).textContent = from;
    find("target-label", HTMLElement).textContent = to;
    [source.lang, target.lang] = languages;
  }
  const isKnown = [...beams.options].some((option) => Number(option.value) === search.num_beams);
  beams.value = `${isKnown ? search.num_beams : 4}`;
  const box = find("examples", HTMLElement);
  box.hidden = !examples.length;
  box.append(...examples.map((example) => {
    const button = element("button", { type: "button", lang: languages?.[0] ?? "" }, example);
    button.addEventListener("click", () => {
      source.value = example;
      source.focus();
      ask();
    });
    return button;
  }));
}

async function start() {
  const response = await fetch("settings.json");
  if (!response.ok) throw new Error(`settings.json could not be loaded (${response.status}).`);
  describe(await response.json());
  await keepFiles();
  worker = new Worker("worker.js", { type: "module" });
  worker.addEventListener("message", listen);
  worker.addEventListener("error", ({ message }) => say(`This browser cannot run the model: ${message ?? ""}`, true));
}

source.addEventListener("input", askSoon);
document.addEventListener("selectionchange", () => { if (document.activeElement === source) show(); });
beams.addEventListener("change", () => {
  known = new Map();
  ask();
});
clear.addEventListener("click", () => {
  source.value = "";
  source.focus();
  ask();
});
copy.addEventListener("click", async () => {
  try {
    const lines = readLines().map((line) => known.get(line)?.translations[0]?.text ?? "");
    await navigator.clipboard.writeText(lines.join("\n"));
    say("Copied");
  } catch (error) {  // without https there is no clipboard
    say(error instanceof Error ? error.message : `${error}`, true);
  }
});
start().catch((error) => {
  progress.hidden = true;
  say(`${error.message ?? error}`, true);
});
