// What every section uses: the report, words in two languages, numbers, tables.

const R = JSON.parse(document.getElementById("data").textContent);
const overall = R.overall;

const ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"};
const escape = text => String(text).replace(/[&<>"']/g, character => ENTITIES[character]);

// Both languages stand in the page; the style shows one of them.
const both = (en, zh) => en === zh ? en : `<span class="en">${en}</span><span class="zh">${zh}</span>`;
const word = (en, zh) => isChinese() ? zh : en;

// The Chinese of English words that the report's data hold; everything else, such as a model's name, stands for itself.
const CHINESE = {
  "this run": "本次模型", "Human volunteers": "志愿者（真人）", "Random": "随机",
  "all questions": "全部题目", "four options, one right letter": "四个选项的单选题", "all but those printed as 多项选择题": "除标为“多项选择题”以外的题目",
  "Overall comparison on CMExam dataset": "CMExam 总体对比", "Comparing disease classifications": "按疾病组对比", "Comparing clinical department": "按临床科室对比",
  "Comparing medical discipline": "按医学学科对比", "Comparing LLMs' competencies": "按能力领域对比", "Results by question difficulty": "按题目难度的结果",
};
const ENGLISH = {"最佳选择题、配伍选择题、综合分析选择题、多项选择题": "best-choice, matching, case and multiple-choice questions"};
const PARTS = [
  [/, (Table \d+): (.*)$/, (_, table, caption) => `，${table}：${inChinese(caption)}`],
  [/Tables (\d+) and (\d+)/, "表 $1、表 $2"], [/Table (\d+)/, "表 $1"], [/\banswer-only\b/, "直接作答"], [/\bzero-shot\b/, "零样本"], [/\b(\d+)-shot\b/, "$1 样本"],
  [/\bstyle (?=\S)/, "提示风格 "], [/\btemplate (?=\S)/, "对话模板 "], [/\b(\d+) shots\b/, "$1 个示例"],
];
const inChinese = text => CHINESE[text] ?? text;
const said = text => word(ENGLISH[text] ?? text, inChinese(text));
const phrase = text => both(escape(ENGLISH[text] ?? text), escape(inChinese(text)));
// A source or a prompt: its words are ours, in any order.
const described = text => both(escape(text), escape(PARTS.reduce((zh, [words, replacement]) => zh.replace(words, replacement), text)));

// A value of a facet as the data spell it -> its English and Chinese name.
const NAMES = new Map(R.tables.map(({facet, cells}) => [facet, new Map(cells.flatMap(cell => cell.values.map(value => [value, cell])))]));
const named = (facet, value) => NAMES.get(facet)?.get(value) ?? {en: value, zh: value};
const facetName = facet => ({en: facet, zh: R.tables.find(table => table.facet === facet)?.zh ?? facet});

function heading(key) {
  const names = R.headings[key];
  return names ? both(escape(names.en), escape(names.zh)) : escape(key);
}

const count = value => Number(value).toLocaleString("en");

function number(value, key, digits = 1) {
  if (value == null) return "–";
  if (Array.isArray(value)) return `<span class="nowrap">${value.map(end => end.toFixed(1)).join("–")}</span>`;
  if (typeof value !== "number") return escape(value);
  const kind = (R.headings[key] || {}).kind;
  if (kind === "count") return count(value);
  return (kind === "fraction" ? value * 100 : value).toFixed(digits);
}

const signed = (value, digits = 1) => (value > 0 ? "+" : value < 0 ? "−" : "±") + Math.abs(value).toFixed(digits);

// Columns that this report has; on a narrow screen only the first of them are shown.
const shownColumns = R.columns.filter(key => overall[key] != null);
const NARROW = ["n", "accuracy", "accuracy_ci"];

const sections = [];
function section(id, en, zh, html) {
  sections.push({id, en, zh});
  byId("main").insertAdjacentHTML("beforeend", `<section id="${id}"><h2>${both(en, zh)}</h2>${html}</section>`);
}

// A cell is {html, sort} or plain HTML; a line is {cells, go, small}.
function table(head, lines, {sortable = true, wide = []} = {}) {
  const hide = i => wide.includes(i) ? ' class="wide"' : "";
  const headCells = head.map((text, i) => `<th${hide(i)}>${text}</th>`).join("");
  const body = lines.map(line => {
    const attributes = line.go ? ` data-go="${escape(JSON.stringify(line.go))}" tabindex="0" class="go${line.small ? " small" : ""}"` : "";
    const cells = line.cells.map((cell, i) => {
      const {html, sort} = typeof cell === "object" ? cell : {html: cell, sort: cell};
      return `<td${hide(i)} data-sort="${escape(sort)}">${html}</td>`;
    });
    return `<tr${attributes}>${cells.join("")}</tr>`;
  });
  return `<div class="scroll"><table class="${sortable ? "sort" : ""}"><thead><tr>${headCells}</tr></thead><tbody>${body.join("")}</tbody></table></div>`;
}

const sortKey = value => value == null ? -1 : Array.isArray(value) ? value[0] : value;

function scoreTable(entries, columns = shownColumns) {
  const wide = columns.map((key, i) => NARROW.includes(key) ? null : i + 1).filter(i => i != null);
  const lines = entries.map(({name, scores, ...rest}) => ({
    cells: [{html: name, sort: rest.sort ?? name}, ...columns.map(key => ({html: number(scores[key], key), sort: sortKey(scores[key])}))],
    ...rest,
  }));
  return table(["", ...columns.map(heading)], lines, {wide});
}
