// What the search of the site finds, by the files that the site itself loads, without a browser: node search.js SITE QUERY ...
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const element = () => ({ dataset: { content_root: "./" }, classList: { add() {}, remove() {} }, appendChild() {}, style: {} });
const document = {
  readyState: "complete",
  documentElement: element(),
  body: element(),
  addEventListener() {},
  createElement: element,
  getElementById: element,
  querySelector: element,
  querySelectorAll: () => [],
};
const window = { location: { search: "", href: "file:///" }, localStorage: {} };
const storage = { getItem: () => null, setItem() {}, removeItem() {} };
const context = vm.createContext({ URL, URLSearchParams, document, localStorage: storage, setTimeout() {}, window });
const read = (...parts) => fs.readFileSync(path.join(site, ...parts), "utf8");
const loaded = ["documentation_options.js", "doctools.js", "base-stemmer.js", "english-stemmer.js", "language_data.js", "searchtools.js"];
const scripts = [
  "const SPHINX_HIGHLIGHT_ENABLED = false;",
  ...loaded.filter((name) => fs.existsSync(path.join(site, "_static", name))).map((name) => read("_static", name)),
  "globalThis.Stemmer ??= window.Stemmer;", // a global of browsers is an attribute of their window
  read("searchindex.js"),
  "globalThis.results = (query) => Search._performSearch(...Search._parseQuery(query));",
];
vm.runInContext(scripts.join("\n;"), context);

// The last result is the first on the page.
const first = (query) => {
  const [page, , anchor] = context.results(query).at(-1) ?? ["", "", ""];
  return page && `${page}.html${anchor}`;
};
console.log(JSON.stringify(Object.fromEntries(queries.map((query) => [query, first(query)]))));
