// The frame of every page: two languages, light or dark, tables that a click on their head sorts.

const root = document.documentElement;
const byId = id => document.getElementById(id);
const isChinese = () => root.dataset.lang === "zh";

function sortBy(th) {
  const body = th.closest("table").tBodies[0], column = th.cellIndex, up = th.getAttribute("aria-sort") === "descending";
  th.closest("tr").querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
  th.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = line => line.cells[column].dataset.sort ?? line.cells[column].textContent;
  const order = (a, b) => isNaN(parseFloat(key(a))) || isNaN(parseFloat(key(b))) ? key(a).localeCompare(key(b), "zh") : parseFloat(key(a)) - parseFloat(key(b));
  [...body.rows].sort((a, b) => up ? order(a, b) : order(b, a)).forEach(line => body.append(line));
}

// `redraw` is called whenever another language is chosen.
function startFrame(redraw = () => {}) {
  const setLanguage = language => {
    root.dataset.lang = root.lang = language;
    byId("lang").textContent = language === "zh" ? "English" : "中文";
    redraw();
  };
  byId("lang").onclick = () => setLanguage(isChinese() ? "en" : "zh");
  byId("theme").onclick = () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; };
  document.addEventListener("click", ({target}) => {
    const th = target.closest("table.sort thead th");
    if (th) sortBy(th);
  });
  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  setLanguage((navigator.language || "").startsWith("zh") ? "zh" : "en");
}
