// A page's script against a document of strings: prints what it shows in one language, as JSON {id: HTML}.
// node shown_page.js report.html en

const {readFileSync} = require("node:fs");
const page = readFileSync(process.argv[2], "utf8"), language = process.argv[3];
const [, data, script] = page.match(/<script type="application\/json" id="data">([\s\S]*?)<\/script>\s*<script>([\s\S]*?)<\/script>/);

const elements = new Map();
function element(id) {
  if (!elements.has(id)) {
    elements.set(id, {
      id, innerHTML: id === "data" ? data : "", textContent: id === "data" ? data : "", dataset: {}, value: "",
      insertAdjacentHTML(_, html) { this.innerHTML += html; },
      scrollIntoView() {},
    });
  }
  return elements.get(id);
}
const written = id => [...elements.values()].some(one => one.innerHTML.includes(`id="${id}"`));
const fixed = ["data", "main", "nav", "lang", "theme"];
const scope = {
  document: {documentElement: {dataset: {}}, getElementById: id => fixed.includes(id) || written(id) ? element(id) : null, addEventListener() {}},
  navigator: {language}, location: {hash: ""}, history: {replaceState() {}},
  matchMedia: () => ({matches: false}), addEventListener() {},
  ResizeObserver: class { observe() {} },
};
new Function(...Object.keys(scope), script)(...Object.values(scope));
setTimeout(() => console.log(JSON.stringify(Object.fromEntries([...elements].map(([id, one]) => [id, one.innerHTML])))), 200);
