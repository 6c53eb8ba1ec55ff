// The answer, the figures and the tables around the timeline, and their numbers as files.

const report = page.report;

function made(tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
}

function formatCell(value, unit) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (unit === "s") return formatSeconds(value);
  if (unit === "B") return formatBytes(value);
  if (unit === "%") return `${(100 * value).toFixed(1)} %`;
  return value.toLocaleString("en", { maximumFractionDigits: value >= 1000 ? 0 : 2 });
}

function panel(title) {
  const section = made("section", "panel");
  section.append(made("h2", "", title));
  element("panels").append(section);
  return section;
}

const tableOf = (key) => report.tables.find((table) => table.key === key);
const valuesOf = (table, name) => {
  const at = table.columns.findIndex((column) => column.name === name);
  return table.rows.map((row) => row[at]);
};

function save(name, type, text) {
  const link = made("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const withUnit = ({ name, unit }) => (unit === "s" || unit === "B" ? `${name} (${unit})` : name);

/** A leading =, +, - or @ of a name would be a formula to a spreadsheet. */
function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "string") return `${value}`;
  const text = /^[=+\-@]/.test(value) ? `'${value}` : value;
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const csvOf = (table) =>
  [table.columns.map(withUnit), ...table.rows].map((row) => row.map(csvCell).join(",")).join("\n") + "\n";

/** What the chosen rank holds over time. */
function saveHeld() {
  const { time, held } = curves[chosenRank], list = partsOf(chosenRank);
  const columns = [{ name: "time", unit: "s" }, { name: "held", unit: "B" }, ...list.map(([name]) => ({ name, unit: "B" }))];
  const rows = Array.from(time, (seconds, i) => [seconds, held[i], ...list.map(([, bytesAt]) => bytesAt(i))]);
  save(`memory-rank-${chosenRank}.csv`, "text/csv", csvOf({ columns, rows }));
}

function button(text, title, does) {
  const node = made("button", "", text);
  node.title = title;
  node.onclick = does;
  return node;
}

function drawTable(table) {
  const section = panel(table.title);
  section.firstChild.append(
    button("CSV", `These numbers as ${table.key}.csv`, () => save(`${table.key}.csv`, "text/csv", csvOf(table))),
  );
  const scroll = made("div", table.columns.length > 8 ? "scroll wide" : "scroll"), grid = made("table"), top = grid.createTHead().insertRow();
  const isWords = table.columns.map((_, i) => table.rows.some((row) => typeof row[i] === "string"));
  table.columns.forEach((column, i) => {
    const cell = made("th", isWords[i] ? "word" : "", column.name);
    cell.scope = "col";
    top.append(cell);
  });
  const body = grid.createTBody();
  for (const row of table.rows) {
    const line = body.insertRow();
    row.forEach((value, i) => line.append(made("td", isWords[i] ? "word" : "", formatCell(value, table.columns[i].unit))));
  }
  scroll.tabIndex = 0; // keys scroll it
  scroll.append(grid);
  section.append(scroll);
}

function drawSummary() {
  element("answer").textContent = report.answer;
  for (const { name, value, unit } of report.figures) {
    const tile = made("div", "tile");
    tile.append(made("b", "", formatCell(value, unit)), made("span", "", name));
    element("tiles").append(tile);
  }
  element("buttons").prepend(
    button("JSON", "All numbers as one document", () =>
      save("report.json", "application/json", JSON.stringify(report, null, 1))),
    button("print", "Print, or save as PDF", () => window.print()),
  );
}
