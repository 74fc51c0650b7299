"use strict";
const R = JSON.parse(document.getElementById("data").textContent);
const O = R.overall, root = document.documentElement;
const $ = id => document.getElementById(id);
const esc = s => String(s).replace(/[&<>"']/g, c => ({"&":"&amp;","<":"&lt;",">":"&gt;",'"':"&quot;","'":"&#39;"}[c]));
const L = (en, zh) => `<span class="en">${en}</span><span class="zh">${zh}</span>`;
const F = ["weighted_f1", "precision", "recall"];
const num = (v, key, d = 1) => v == null ? "–" : Array.isArray(v) ? v.map(x => x.toFixed(1)).join("–") : typeof v !== "number" ? esc(v)
  : ["n", "answered", "explanations", "scored"].includes(key) ? v.toLocaleString("en") : (F.includes(key) ? v * 100 : v).toFixed(d);
const NAMES = {n:["Questions","题数"], accuracy:["Accuracy %","正确率 %"], accuracy_ci:["95% interval","95% 区间"], weighted_f1:["Weighted F1 %","加权 F1 %"], answered:["Readable","可读"],
  bleu1:["BLEU-1","BLEU-1"], bleu2:["BLEU-2","BLEU-2"], bleu4:["BLEU-4","BLEU-4"], rouge1:["ROUGE-1","ROUGE-1"], rouge2:["ROUGE-2","ROUGE-2"], rougeL:["ROUGE-L","ROUGE-L"], explanations:["Explanations","解析数"]};
const N = key => NAMES[key] ? L(...NAMES[key]) : esc(key);
const COLS = ["n", "accuracy", "accuracy_ci", "weighted_f1", "answered", "bleu1", "bleu4", "rouge1", "rougeL"].filter(k => O[k] != null);
const BASE = {uniform_subset:["Guessing any set of letters","随机猜任意字母组合"], uniform_single:["Guessing one letter","随机猜一个字母"], majority:["Always the most frequent answer","总选最常见的答案"]};

const sections = [];
function section(id, en, zh, html) { sections.push([id, en, zh]); $("main").insertAdjacentHTML("beforeend", `<section id="${id}"><h2>${L(en, zh)}</h2>${html}</section>`); }
function table(head, rows, cls = "sort") {
  return `<div class="scroll"><table class="${cls}"><thead><tr>${head.map(h => `<th>${h}</th>`).join("")}</tr></thead><tbody>${rows.map(r =>
    `<tr class="${r.cls || ""}" ${r.go ? `data-go="${esc(r.go)}" tabindex="0"` : ""}>${r.cells.map(([v, key]) => `<td data-v="${esc(v == null ? -1 : Array.isArray(v) ? v[0] : v)}">${key === "html" ? r.html || esc(v) : num(v, key)}</td>`).join("")}</tr>`).join("")}</tbody></table></div>`;
}
const scoreRow = (html, name, s, extra = {}) => ({html, cells: [[name, "html"], ...COLS.map(k => [s[k], k])], ...extra});

function headline() {
  const facts = [["answered", L("outputs with a readable answer", "可读出答案的输出"), O.n ? `${num(O.answered, "n")} / ${num(O.n, "n")}` : "–"],
    ["weighted_f1", N("weighted_f1"), num(O.weighted_f1, "weighted_f1")], ...["bleu1", "bleu4", "rouge1", "rouge2", "rougeL"].filter(k => O[k] != null).map(k => [k, N(k), num(O[k], k)])];
  const ci = O.accuracy_ci;
  section("headline", "Result", "结果", `<div class="top"><div><div class="big">${num(O.accuracy)}<small>%</small></div><div>${L("of the questions answered exactly right", "的题目完全答对")}</div></div>
   ${facts.map(([k, t, v]) => `<div class="fact"><b>${v}</b>${t}${R.intervals[k] ? `<br>${num(R.intervals[k])}` : ""}</div>`).join("")}</div>
   <p style="margin-top:14px">${ci ? L(`Of ${num(O.scored ?? O.n, "n")} questions with a known answer, ${num(O.accuracy)}% were right. If the exam were repeated with other questions of the same kind, the accuracy would be expected between <b>${ci[0].toFixed(1)}% and ${ci[1].toFixed(1)}%</b> (95% interval). A question with several right letters counts only when all of them, and no other, were given.`,
     `在 ${num(O.scored ?? O.n, "n")} 道有标准答案的题目中，答对 ${num(O.accuracy)}%。换一批同类题目重考，正确率预计在 <b>${ci[0].toFixed(1)}% 到 ${ci[1].toFixed(1)}%</b> 之间（95% 区间）。多选题须全部选对且不多选才算对。`)
     : L("The answers of these questions are not published, so there is no accuracy.", "这些题目的答案未公布，因此没有正确率。")}
   ${O.explanations ? L(` BLEU and ROUGE (0 to 100) measure how far the wording of ${num(O.explanations, "n")} explanations overlaps with the reference; they do not measure whether an explanation is medically right.`, ` BLEU 与 ROUGE（0–100）衡量 ${num(O.explanations, "n")} 条解析与参考文本的字面重合，不衡量其医学正确性。`) : ""}</p>`);
}
function bars() {
  const items = [{t: ["This run", "本次模型"], v: O.accuracy, ci: O.accuracy_ci, own: 1}];
  const C = R.comparison;
  for (const [name, s] of Object.entries(R.runs || {}).slice(1)) items.push({t: [name, name], v: s.accuracy, ci: s.accuracy_ci});
  if (C && C.n) items.push({t: [C.name, C.name], v: 100 * (C.both + C.lost.length) / C.n});
  for (const [k, b] of Object.entries(R.baselines)) items.push({t: BASE[k], v: b.expected, guess: 1});
  for (const r of R.published ? R.published.rows : []) items.push({t: [r.name, r.name], v: r.accuracy, pub: 1});
  const shown = items.filter(i => i.v != null), h = 28, w = 960, x0 = 250, X = v => x0 + v / 100 * (w - x0 - 70);
  if (!shown.length) return;
  const svg = lang => `<svg viewBox="0 0 ${w} ${shown.length * h + 26}" role="img">` + [0, 20, 40, 60, 80, 100].map(v => `<line class="axis" x1="${X(v)}" x2="${X(v)}" y1="0" y2="${shown.length * h}"/><text class="soft" x="${X(v)}" y="${shown.length * h + 17}" text-anchor="middle">${v}</text>`).join("") +
    shown.map((i, n) => { const y = n * h, t = i.t[lang]; return `<text x="${x0 - 10}" y="${y + 19}" text-anchor="end">${esc(t.length > 32 ? "…" + t.slice(-31) : t)}</text><rect x="${x0}" y="${y + 6}" width="${Math.max(1, X(i.v) - x0)}" height="17" rx="3" fill="${i.own ? "var(--main)" : "var(--bar)"}" opacity="${i.guess ? .55 : 1}"/>` +
      (i.ci ? `<path d="M${X(i.ci[0])} ${y + 14.5}H${X(i.ci[1])}M${X(i.ci[0])} ${y + 10}v9M${X(i.ci[1])} ${y + 10}v9" stroke="var(--ink)" fill="none" stroke-width="1.5"/>` : "") + `<text x="${X(i.ci ? i.ci[1] : i.v) + 7}" y="${y + 19}">${i.v.toFixed(1)}${i.pub ? " †" : ""}</text>`; }).join("") + "</svg>";
  const sim = R.baselines.uniform_subset;
  section("bars", "Compared", "对比", `<p class="soft">${L("Accuracy in percent; the whisker is the 95% interval. A model whose bar does not clearly pass the guessing bars has shown no knowledge.", "正确率（%），短线为 95% 区间。若未明显高于随机猜测，则不能说明模型具备知识。")}</p>${L(svg(0), svg(1))}
   ${sim && sim.mean != null ? `<p class="soft">${L(`Guessing any set of letters, simulated with ${sim.seeds} seeds on these questions: ${sim.mean.toFixed(2)} ± ${sim.std.toFixed(2)}%.`, `随机猜字母组合，${sim.seeds} 个种子模拟：${sim.mean.toFixed(2)} ± ${sim.std.toFixed(2)}%。`)}</p>` : ""}${R.published ? `<p class="soft">† ${esc(R.published.source)}</p>` : ""}`);
}
function runs() {
  let html = "";
  if (R.runs) html += table(["", ...COLS.map(N)], Object.entries(R.runs).map(([n, s]) => scoreRow(esc(n), n, s)));
  if (R.summary) html += `<h3>${L("Mean and deviation of the runs", "多次运行的均值与标准差")}</h3>` + table(["", L("mean", "均值"), L("deviation", "标准差"), L("runs", "次数")], Object.entries(R.summary).map(([k, s]) => ({html: N(k), cells: [[k, "html"], [s.mean, k], [s.std, k], [s.runs, "n"]]})), "");
  if (R.agreement) html += `<h3>${L("Same answer", "答案一致率")}</h3>` + table(["", "%"], Object.entries(R.agreement).map(([k, v]) => ({cells: [[k, "html"], [v, ""]]})), "");
  if (R.profiles) html += `<h3>${L("The same outputs by every scoring profile", "同一输出在各评分规则下的结果")}</h3>` + table(["", ...COLS.map(N)], Object.entries(R.profiles).map(([n, s]) => scoreRow(esc(n), n, s)));
  const C = R.comparison;
  if (C) { const acc = C.metrics.accuracy, sure = C.mcnemar_p < .05;
    html += `<h3>${L("Against ", "与 ")}${esc(C.name || "baseline")}</h3><p>${L(`${C.gained.length} questions became right and ${C.lost.length} became wrong; ${C.both} were right in both. McNemar's exact test: p = ${C.mcnemar_p.toPrecision(3)}. ${sure ? "Chance alone would hardly give this difference." : "<b>This difference can be chance.</b>"}`, `新答对 ${C.gained.length} 题，新答错 ${C.lost.length} 题，两者都对 ${C.both} 题。McNemar 精确检验 p = ${C.mcnemar_p.toPrecision(3)}。${sure ? "差异难以用偶然解释。" : "<b>差异可能只是偶然。</b>"}`)} <button class="link" data-go="gained">${L("see newly right", "查看新答对")}</button> · <button class="link" data-go="lost">${L("see newly wrong", "查看新答错")}</button></p>` +
      table(["", L("difference", "差值"), L("95% interval", "95% 区间"), "p"], Object.entries(C.metrics).map(([k, m]) => ({html: N(k), cells: [[k, "html"], [(m.difference > 0 ? "+" : "") + m.difference.toFixed(2), ""], [`${m.low.toFixed(2)} … ${m.high.toFixed(2)}`, ""], [m.p_value.toFixed(4), ""]]})), ""); }
  if (html) section("runs", "Runs and tests", "多次运行与检验", html);
}
function breakdowns() {
  const html = R.tables.map(t => { const P = (R.published && R.published.facet === t.facet ? R.published.rows : []);
    const rows = t.cells.map(c => { const r = scoreRow(`<span>${esc(c.name)}</span> <span class="soft">${c.zh !== c.name ? esc(c.zh) : ""}${c.en !== c.name && c.en !== c.zh ? ` <span class="en">${esc(c.en)}</span>` : ""}</span>`, c.name, c.scores, {cls: "go" + (c.small ? " small" : ""), go: JSON.stringify([t.facet, c.values])}); P.forEach(p => r.cells.push([p[c.name], ""])); return r; });
    return `<details ${t.cells.length <= 40 ? "open" : ""}><summary><h3 style="display:inline-block">${L(esc(t.facet), esc(t.zh))} <small>${t.source ? esc(t.source) : ""}</small></h3></summary>${table(["", ...COLS.map(N), ...P.map(p => esc(p.name) + " †")], rows)}
     ${t.macro_accuracy != null ? `<p>${L("Mean over the rows (the paper's average)", "各行均值（论文口径）")}: <b>${t.macro_accuracy.toFixed(2)}</b></p>` : ""}${t.cells.some(c => c.small) ? `<p class="soft"><i>${L(`Italic: fewer than ${t.minimum} questions; read the interval, not the accuracy.`, `斜体：少于 ${t.minimum} 题，请看区间而非正确率。`)}</i></p>` : ""}</details>`; }).join("");
  if (html) section("facets", "By subject", "分类结果", `<p class="soft">${L("Click a heading to sort, a row to see its questions.", "点击表头排序，点击一行查看其题目。")}</p>` + html);
}
function lengths() {
  const B = R.by_length.filter(b => b.accuracy != null); if (!B.length) return;
  const w = 960, h = 280, x0 = 46, y0 = 230, X = i => x0 + 40 + i * (w - x0 - 90) / Math.max(1, B.length - 1), top = Math.min(100, Math.ceil(Math.max(...B.map(b => b.accuracy_ci[1])) / 10) * 10), Y = v => y0 - v / top * (y0 - 16);
  let s = ""; for (let v = 0; v <= top; v += top > 50 ? 20 : 10) s += `<line class="axis" x1="${x0}" x2="${w}" y1="${Y(v)}" y2="${Y(v)}"/><text class="soft" x="${x0 - 8}" y="${Y(v) + 4}" text-anchor="end">${v}</text>`;
  s += `<path d="M${B.map((b, i) => `${X(i)} ${Y(b.accuracy_ci[1])}`).join("L")}L${B.map((b, i) => `${X(i)} ${Y(b.accuracy_ci[0])}`).reverse().join("L")}Z" fill="var(--main)" opacity=".15"/><path d="M${B.map((b, i) => `${X(i)} ${Y(b.accuracy)}`).join("L")}" stroke="var(--main)" stroke-width="2" fill="none"/>`;
  B.forEach((b, i) => s += `<circle cx="${X(i)}" cy="${Y(b.accuracy)}" r="4.5" fill="${b.small ? "var(--card)" : "var(--main)"}" stroke="var(--main)"><title>${b.accuracy.toFixed(1)}% (${num(b.accuracy_ci)}), n=${b.n}</title></circle><text x="${X(i)}" y="${y0 + 20}" text-anchor="middle">${b.from}–${b.to ?? ""}</text><text class="soft" x="${X(i)}" y="${y0 + 38}" text-anchor="middle">n=${b.n}</text>`);
  section("length", "By question length", "按题干长度", `<p class="soft">${L("Accuracy (%) over the number of characters of the question, with its 95% interval; hollow points have few questions.", "正确率（%）随题干字数的变化，阴影为 95% 区间；空心点题数过少。")}</p><svg viewBox="0 0 ${w} ${h}" role="img">${s}</svg>`);
}
function confusion() {
  const C = R.confusion; if (!C.gold || !C.gold.length) return;
  const word = n => n === "several" ? L("several", "多个") : n === "unreadable" ? L("unreadable", "不可读") : esc(n);
  const rows = C.counts.map((r, i) => { const sum = r.reduce((a, b) => a + b, 0) || 1; return `<tr><th>${word(C.gold[i])}</th>${r.map((v, j) => `<td data-cell="${esc(C.gold[i] + "|" + C.predicted[j])}" class="${C.gold[i] === C.predicted[j] && C.gold[i] !== "several" ? "hit" : ""}" style="background:rgba(var(--heat),${(v / sum * .85).toFixed(3)})" title="${(v / sum * 100).toFixed(1)}%">${v}</td>`).join("")}</tr>`; }).join("");
  section("confusion", "Letters", "选项混淆", `<p class="soft">${L("Rows: the right answer; columns: what was answered. A dark column off the outlined diagonal means a preference for that letter. Click to see the questions.", "行为正确答案，列为模型所答。描边对角线以外的深色列表示对该字母的偏好。点击查看题目。")}</p><div class="scroll"><table class="heat"><thead><tr><th></th>${C.predicted.map(p => `<th style="text-align:center">${word(p)}</th>`).join("")}</tr></thead><tbody>${rows}</tbody></table></div>`);
}
const SIZE = 20, S = {state: "wrong", facet: -1, value: "", text: "", page: 0, ids: null, cell: null};
const one = a => !a ? "unreadable" : a.length > 1 ? "several" : a;
const state = q => !q[4] ? "unreadable" : q[3] == null ? "unknown" : q[3] === q[4] ? "right" : "wrong";
const haystack = R.items.map(q => [q[0], q[1], ...q[2].map(o => o[1]), q[5], q[6]].join("\n").toLowerCase());
function chosen() {
  const needle = S.text.trim().toLowerCase(), out = [];
  R.items.forEach((q, i) => { if ((S.state === "all" || (S.state === "failed" ? state(q) !== "right" : state(q) === S.state)) && (S.facet < 0 || !S.value.length || S.value.includes(q[7][S.facet])) &&
    (!S.ids || S.ids.has(q[0])) && (!S.cell || (q[3] && one(q[3]) === S.cell[0] && one(q[4]) === S.cell[1])) && (!needle || haystack[i].includes(needle))) out.push(q); });
  return out;
}
function marked(text) { const n = S.text.trim(); if (!n) return esc(text); const low = text.toLowerCase(), l = n.toLowerCase(); if (low.length !== text.length) return esc(text); let out = "", at = 0, i; while ((i = low.indexOf(l, at)) >= 0) { out += esc(text.slice(at, i)) + `<mark>${esc(text.slice(i, i + l.length))}</mark>`; at = i + l.length; } return out + esc(text.slice(at)); }
const WORD = {right: L("right", "答对"), wrong: L("wrong", "答错"), unreadable: L("unreadable", "不可读"), unknown: L("no published answer", "答案未公布")};
function card(q) { const s = state(q), gold = q[3] || "", said = q[4] || "";
  return `<article class="card ${s}"><b class="verdict">${WORD[s]}</b> <small>${esc(q[0])} · ${L("right answer", "正确答案")} <b>${esc(gold || "?")}</b> · ${L("given", "模型回答")} <b>${esc(said || "–")}</b></small><div class="stem">${marked(q[1])}</div>
  <ul class="options">${q[2].map(([l, t]) => `<li class="${gold.includes(l) ? "gold" : said.includes(l) ? "miss" : ""}">${esc(l)} ${marked(t)} ${gold.includes(l) ? "✓" : ""}${said.includes(l) ? " ←" : ""}</li>`).join("")}</ul><div>${q[7].map((v, i) => v ? `<span class="tag" title="${esc(R.facets[i])}">${esc(v)}</span>` : "").join("")}</div>
  <div class="two"><div><h4>${L("What the model wrote", "模型输出")}</h4><pre>${marked(q[5]) || "∅"}</pre></div><div><h4>${L("Reference explanation", "参考解析")}</h4><pre>${marked(q[6]) || "–"}</pre></div></div></article>`; }
function draw() {
  const list = chosen(), pages = Math.max(1, Math.ceil(list.length / SIZE)); S.page = Math.min(Math.max(0, S.page), pages - 1);
  $("found").innerHTML = `${list.length.toLocaleString("en")} ${L("questions", "题")}` + (S.ids || S.cell ? ` <button class="link" id="clear">${L("(show all again)", "（取消筛选）")}</button>` : "");
  $("cards").innerHTML = list.slice(S.page * SIZE, (S.page + 1) * SIZE).map(card).join(""); $("where").textContent = `${S.page + 1} / ${pages}`; $("prev").disabled = !S.page; $("next").disabled = S.page >= pages - 1;
  if ($("clear")) $("clear").onclick = () => { S.ids = S.cell = null; S.page = 0; draw(); };
}
function values() {
  const v = S.facet < 0 ? [] : [...new Set(R.items.map(q => q[7][S.facet]).filter(Boolean))].sort();
  $("value").innerHTML = `<option value="">${zh() ? "全部" : "all"}</option>` + v.map(x => `<option ${S.value.includes(x) && S.value.length ? "selected" : ""}>${esc(x)}</option>`).join("");
}
const zh = () => root.dataset.lang === "zh";
function controls() {
  const opt = (v, en, z) => `<option value="${v}" ${S.state === v ? "selected" : ""}>${zh() ? z : en}</option>`;
  $("state").innerHTML = opt("all", "all questions", "全部题目") + opt("right", "right", "答对") + opt("wrong", "wrong", "答错") + opt("unreadable", "unreadable", "不可读") + opt("failed", "wrong or unreadable", "答错或不可读");
  $("facet").innerHTML = `<option value="-1">${zh() ? "全部分类" : "any subject"}</option>` + R.facets.map((f, i) => `<option value="${i}" ${S.facet === i ? "selected" : ""}>${esc(f)}</option>`).join("");
  $("text").placeholder = zh() ? "搜索题目、选项、输出" : "search questions, options, outputs"; $("lang").textContent = zh() ? "English" : "中文"; values(); draw();
}
function jump(change) { Object.assign(S, {state: "all", facet: -1, value: "", text: "", page: 0, ids: null, cell: null}, change); $("text").value = S.text; controls(); $("browser").scrollIntoView({behavior: "smooth"}); }
function browser() {
  section("browser", "Questions", "逐题查看", `<div class="tools"><select id="state"></select><select id="facet"></select><select id="value"></select><input id="text" type="search"><span id="found"></span><span style="flex:1"></span><button id="prev" type="button">←</button><span id="where"></span><button id="next" type="button">→</button></div><div id="cards"></div>`);
  $("state").onchange = e => { S.state = e.target.value; S.page = 0; draw(); }; $("facet").onchange = e => { S.facet = +e.target.value; S.value = ""; S.page = 0; values(); draw(); };
  $("value").onchange = e => { S.value = e.target.value ? [e.target.value] : ""; S.page = 0; draw(); };
  let wait; $("text").oninput = e => { clearTimeout(wait); wait = setTimeout(() => { S.text = e.target.value; S.page = 0; draw(); }, 150); };
  $("prev").onclick = () => { S.page--; draw(); }; $("next").onclick = () => { S.page++; draw(); };
}
function origin() {
  section("origin", "Method", "计算方式", `<p class="soft">${L("Two numbers can be compared only if their signatures are equal.", "签名相同的数值才可比较。")}</p>` + table([L("number", "指标"), L("signature", "签名")], Object.entries(R.signature).map(([k, v]) => ({cells: [[k, "html"], [typeof v === "string" ? v : JSON.stringify(v), ""]]})), "sig") + `<details><summary>${L("Files, versions and settings", "文件、版本与设置")}</summary><pre style="white-space:pre-wrap;overflow-wrap:anywhere">${esc(JSON.stringify(R.provenance, null, 2))}</pre></details>`);
}
headline(); bars(); runs(); breakdowns(); lengths(); confusion(); browser(); origin();
$("nav").innerHTML = sections.map(([id, en, z]) => `<a href="#${id}">${L(en, z)}</a>`).join("");
document.addEventListener("click", e => {
  const th = e.target.closest("table.sort thead th"), go = e.target.closest("[data-go]"), cell = e.target.closest("[data-cell]");
  if (th) { const t = th.closest("table"), i = th.cellIndex, up = th.getAttribute("aria-sort") === "descending"; t.querySelectorAll("th").forEach(x => x.removeAttribute("aria-sort")); th.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = r => r.cells[i].dataset.v, c = (a, b) => { const x = +key(a), y = +key(b); return isNaN(x) || isNaN(y) ? key(a).localeCompare(key(b), "zh") : x - y; }; [...t.tBodies[0].rows].sort((a, b) => up ? c(a, b) : c(b, a)).forEach(r => t.tBodies[0].append(r)); }
  else if (go) { const g = go.dataset.go; if (g === "gained" || g === "lost") jump({ids: new Set(R.comparison[g])}); else { const [f, v] = JSON.parse(g); jump({facet: R.facets.indexOf(f), value: v}); } }
  else if (cell) jump({cell: cell.dataset.cell.split("|")});
});
document.addEventListener("keydown", e => { if (e.key === "Enter" && e.target.matches("tr[data-go]")) e.target.click(); });
$("lang").onclick = () => { root.dataset.lang = zh() ? "en" : "zh"; root.lang = root.dataset.lang; controls(); };
$("theme").onclick = () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; };
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
if (!R.items.some(q => state(q) === "wrong")) S.state = "all";
if ((navigator.language || "").startsWith("zh")) root.dataset.lang = root.lang = "zh";
controls();
