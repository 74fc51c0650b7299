// The way to the sections; clicks, language, theme and the link to a question.

byId("nav").innerHTML = sections.map(({id, en, zh}) => `<a href="#${id}">${both(en, zh)}</a>`).join("");

function sortBy(th) {
  const body = th.closest("table").tBodies[0], column = th.cellIndex, up = th.getAttribute("aria-sort") === "descending";
  th.closest("tr").querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
  th.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = line => line.cells[column].dataset.sort;
  const order = (a, b) => isNaN(key(a)) || isNaN(key(b)) ? key(a).localeCompare(key(b), "zh") : key(a) - key(b);
  [...body.rows].sort((a, b) => up ? order(a, b) : order(b, a)).forEach(line => body.append(line));
}

function openLink() {
  if (!location.hash.startsWith("#q=") || !Store.ready) return;
  show({id: decodeURIComponent(location.hash.slice(3))});
}

document.addEventListener("click", event => {
  const th = event.target.closest("table.sort thead th"), target = event.target.closest("[data-go]");
  if (th) sortBy(th);
  else if (target) go(JSON.parse(target.dataset.go));
});
document.addEventListener("keydown", event => { if (event.key === "Enter" && event.target.matches("[data-go]:not(button)")) event.target.click(); });
addEventListener("hashchange", openLink);

function setLanguage(language) {
  root.dataset.lang = root.lang = language;
  byId("lang").textContent = language === "zh" ? "English" : "中文";
  drawControls();
  drawPair();
  if (R.training) drawTraining();
}
byId("lang").onclick = () => setLanguage(isChinese() ? "en" : "zh");
byId("theme").onclick = () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; };
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
setLanguage((navigator.language || "").startsWith("zh") ? "zh" : "en");

Store.open().then(() => {
  if (!Store.index.ids.some((_, i) => Store.state(i) === "wrong")) view.state = "all";
  drawControls();
  drawPair();
  openLink();
});
