// The way to the sections; clicks, language, theme and the link to a question.

byId("nav").innerHTML = sections.map(({id, en, zh}) => `<a href="#${id}">${both(en, zh)}</a>`).join("");

function openLink() {
  if (!location.hash.startsWith("#q=") || !Store.ready) return;
  show({id: decodeURIComponent(location.hash.slice(3))});
}

document.addEventListener("click", event => {
  const target = event.target.closest("[data-go]");
  if (target) go(JSON.parse(target.dataset.go));
});
document.addEventListener("keydown", event => { if (event.key === "Enter" && event.target.matches("[data-go]:not(button)")) event.target.click(); });
addEventListener("hashchange", openLink);

startFrame(() => {
  drawControls();
  drawPair();
  if (R.training) drawTraining();
});

Store.open().then(() => {
  if (!Store.index.ids.some((_, i) => Store.state(i) === "wrong")) view.state = "all";
  drawControls();
  drawPair();
  openLink();
});
