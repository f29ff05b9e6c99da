/** What the page says, in the visitor's language, and the elements it says it with. */

/** @typedef {Record<string, string>} Texts  By key; {name} stands for what is put in. */

export const LANGUAGES = ["en", "zh"];

/** @type {Texts} */
let texts = {};

/**
 * The language that was chosen before, or the browser's.
 * @returns {string}
 */
export function findLanguage() {
  const asked = new URLSearchParams(location.search).get("lang");
  const wanted = [asked ?? "", ...navigator.languages].map((each) => each.slice(0, 2));
  return wanted.find((each) => LANGUAGES.includes(each)) ?? "en";
}

/** @param {string} language */
export async function loadTexts(language) {
  const response = await fetch(`texts.${language}.json`);
  if (!response.ok) throw new Error(`texts.${language}.json could not be loaded (${response.status}).`);
  texts = await response.json();
  document.documentElement.lang = language === "zh" ? "zh-Hans" : language;
  for (const each of document.querySelectorAll("[data-text]")) {
    each.textContent = say(each.getAttribute("data-text") ?? "");
  }
  for (const each of document.querySelectorAll("[data-label]")) {
    each.setAttribute("aria-label", say(each.getAttribute("data-label") ?? ""));
  }
}

/**
 * @param {string} key
 * @param {Record<string, string | number>} [put]
 * @returns {string}
 */
export function say(key, put = {}) {
  if (!(key in texts)) throw new Error(`There is no text ${key}.`);
  return texts[key].replace(/\{(\w+)\}/g, (_, name) => `${put[name]}`);
}

/** @param {string} key */
export const canSay = (key) => key in texts;

/**
 * A number as people read it.
 * @param {number} number
 */
export function format(number) {
  const size = Math.abs(number);
  const text = Number.isInteger(number) && size < 1e6 ? `${number}`
    : size && (size < 1e-3 || size >= 1e5) ? number.toExponential(3) : number.toFixed(4);
  return text.replaceAll("-", "−");
}

/**
 * @param {string} name
 * @param {Record<string, string | number>} [attributes]
 * @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, `${value}`);
  made.append(...children);
  return made;
}

/**
 * @param {Record<string, string | number>} attributes
 * @param {() => void} act
 * @param {...(Node | string)} children
 */
export function button(attributes, act, ...children) {
  const made = element("button", { type: "button", ...attributes }, ...children);
  made.addEventListener("click", act);
  return made;
}

/**
 * @template {Element} T
 * @param {string} id
 * @param {new () => T} kind
 * @returns {T}
 */
export function find(id, kind) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`The page lacks #${id}.`);
  return found;
}
