/**
 * Keeps the page's files for visits without a network. The page's own are fetched at once, the model's as they pass by.
 *
 * What is kept belongs to one version of the page: a new one takes its place once no tab shows the old one. Answers say
 * that the page is isolated from others, without which browsers allow no threads.
 */

const CACHE = "translate-@VERSION@";
const FILES = ["@FILES@"];
const ISOLATION = {
  "Cross-Origin-Embedder-Policy": "require-corp",
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Resource-Policy": "same-origin",
};

const worker = /** @type {ServiceWorkerGlobalScope} */ (/** @type {unknown} */ (self));
const scope = new URL("./", worker.location.href);
// Several pages of one server share its caches.
const kept = `${CACHE} ${scope.pathname}`;

async function install() {
  const cache = await caches.open(kept);
  await cache.addAll(FILES.map((file) => new Request(new URL(file, scope), { cache: "no-cache" })));
}

async function forgetOlder() {
  const others = (await caches.keys()).filter((other) => other !== kept && other.endsWith(` ${scope.pathname}`));
  await Promise.all(others.map((other) => caches.delete(other)));
  await worker.clients.claim();
}

/**
 * Whether a file is the page's: others may lie in the same folder.
 * @param {URL} url
 */
function isOwn(url) {
  const path = url.pathname.slice(scope.pathname.length);
  return path === "" || FILES.includes(path) || path.startsWith("model/") || path.startsWith("runtime/");
}

/**
 * @param {FetchEvent} event
 * @returns {Promise<Response>}
 */
async function respond(event) {
  const cache = await caches.open(kept);
  const url = new URL(event.request.url);
  url.search = url.hash = "";
  if (url.pathname === scope.pathname) url.pathname += "index.html";
  let response = event.request.cache === "reload" ? undefined : await cache.match(url);
  if (!response) {
    response = await fetch(url, { cache: "no-cache" });
    if (!response.ok) return response;
    event.waitUntil(cache.put(url, response.clone()));
  }
  const headers = new Headers(response.headers);
  for (const [header, value] of Object.entries(ISOLATION)) headers.set(header, value);
  return new Response(response.body, { status: response.status, headers });
}

worker.addEventListener("install", (event) => event.waitUntil(install()));
worker.addEventListener("activate", (event) => event.waitUntil(forgetOlder()));
worker.addEventListener("fetch", (event) => {
  const { method, url } = event.request;
  if (method === "GET" && url.startsWith(scope.href) && isOwn(new URL(url))) event.respondWith(respond(event));
});
