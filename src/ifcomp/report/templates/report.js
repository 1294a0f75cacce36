(() => {
  "use strict";

  const byId = (id) => document.getElementById(id);

  /* An element with attributes and children; strings become text, nothing is ever parsed as HTML. */
  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  // Light and dark --------------------------------------------------------------------------------------------------

  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const showTheme = () => byId("theme").setAttribute("aria-pressed", isDark());
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  prefersDark.addEventListener("change", showTheme);
  showTheme();

  if (!byId("data")) return;

  // Data ------------------------------------------------------------------------------------------------------------

  const data = JSON.parse(byId("data").textContent);
  const NUMBERS = [
    "label_probability", "suggested_probability", "error", "parametric_complexity", "stochastic_complexity",
    "label_complexity", "surprise",
  ];
  const columns = data.columns;
  for (const name of NUMBERS) {
    columns[name] = Float64Array.from(columns[name], (value) => (value === null ? NaN : Number(value)));
  }
  const total = columns.rank.length;
  const longest = columns.stochastic_complexity.reduce((most, value) => (value < Infinity && value > most ? value : most), 0);
  const classOrder = new Float64Array(data.classes.length);
  data.classes
    .map((name, position) => [name, position])
    .sort(([a], [b]) => a.localeCompare(b, undefined, { numeric: true }))
    .forEach(([, position], place) => { classOrder[position] = place; });
  const className = (label) => data.classes[label];
  const previewOf = (row) => data.previews[data.shown[columns.index[row]]];
  const searchable = new Map();
  for (let row = 0; row < total; row++) {
    const preview = previewOf(row);
    if (!preview) continue;
    const body = preview.kind === "text" ? preview.content : preview.kind === "row" ? preview.content.flat().join(" ") : "";
    searchable.set(row, `${preview.name} ${body}`.toLowerCase());
  }

  // Numbers as people read them -------------------------------------------------------------------------------------

  const whole = (value) => value.toLocaleString("en-US");
  function probability(value) {
    if (value < 0.001) return "<0.001";
    return value > 0.999 ? ">0.999" : value.toFixed(3);
  }
  function amount(value) {
    if (Number.isNaN(value)) return "–";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    const size = Math.abs(value);
    if (size > 0 && size < 0.01) return value > 0 ? "<0.01" : ">−0.01";
    return size >= 1000 ? whole(Math.round(value)) : value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
  }
  const precise = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(5))) : amount(value));

  // State: what is asked for, and the rows that answer it -----------------------------------------------------------

  const hasSuspects = columns.is_suspect.includes(1);
  const images = data.previews.some((preview) => preview.kind === "image");
  const state = { sort: "rank", descending: false, page: 0, cards: images || matchMedia("(max-width: 760px)").matches };
  let rows = [];

  function matching() {
    const given = byId("given").value, suggested = byId("suggested").value;
    const suspects = byId("suspects").checked;
    const query = byId("query").value.trim().toLowerCase();
    const named = data.classes.map((name) => name.toLowerCase().includes(query));
    const found = [];
    for (let row = 0; row < total; row++) {
      const label = columns.label[row], other = columns.suggested_label[row];
      if (suspects && !columns.is_suspect[row]) continue;
      if (given !== "" && label !== Number(given)) continue;
      if (suggested !== "" && other !== Number(suggested)) continue;
      if (query && !named[label] && !named[other] && String(columns.index[row]) !== query
        && !(searchable.get(row) || "").includes(query)) continue;
      found.push(row);
    }
    return found;
  }

  function sorted(found) {
    const isClass = state.sort === "label" || state.sort === "suggested_label";
    const column = columns[state.sort];
    const sign = state.descending ? -1 : 1;
    const key = (row) => {
      const value = isClass ? classOrder[column[row]] : column[row];
      return Number.isNaN(value) ? Infinity : sign * value;
    };
    const keys = new Float64Array(total);
    for (const row of found) keys[row] = key(row);
    return found.sort((a, b) => (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : a - b));
  }

  const pageSize = () => Number(byId("size").value);
  const pageCount = () => Math.max(1, Math.ceil(rows.length / pageSize()));

  function refresh() {
    rows = sorted(matching());
    state.page = 0;
    showPage();
  }

  // Table -----------------------------------------------------------------------------------------------------------

  function picture(preview, large) {
    if (!preview) return make("span", { class: "nothing", "aria-hidden": "true" });
    if (preview.kind === "image") {
      return make("img", { class: "thumb", src: preview.content, alt: preview.name, decoding: "async" });
    }
    if (preview.kind === "text") return make("p", { class: large ? "text" : "text short", dir: "auto" }, preview.content);
    const fields = large ? preview.content : preview.content.slice(0, 4);
    const items = fields.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    return make("dl", { class: "fields" }, ...items);
  }

  function bar(row) {
    const holder = make("span", { class: "bar", "aria-hidden": "true" });
    for (const name of ["error", "parametric_complexity"]) {
      const part = make("span", { class: name });
      part.style.width = `${Math.min(100, (100 * columns[name][row]) / longest) || 0}%`;
      holder.append(part);
    }
    return holder;
  }

  const headers = [...document.querySelectorAll("#table th[data-column]")];
  const titles = Object.fromEntries(headers.map((header) => [header.dataset.column, header.textContent]));
  const cell = (name, ...children) => (
    make("td", { role: "cell", class: name, "data-title": titles[name] || "" }, ...children));

  const bdi = (text, kind = "") => make("bdi", { class: kind }, text);

  function tableRow(row) {
    const preview = previewOf(row), index = columns.index[row];
    const name = preview && preview.name ? [bdi(preview.name, "name")] : [];
    const more = make("button", { type: "button", class: "more", "aria-label": `Details of example ${index}` }, "Details");
    more.addEventListener("click", () => openDetails(row));
    const line = make("tr", { role: "row" },
      cell("rank", whole(columns.rank[row])),
      cell("index", make("div", { class: "example" }, picture(preview, false), make("span", { class: "caption" }, ...name, make("span", { class: "number" }, `#${index}`)))),
      cell("label", bdi(className(columns.label[row]))),
      cell("suggested_label", bdi(className(columns.suggested_label[row]))),
      cell("label_probability", probability(columns.label_probability[row])),
      cell("suggested_probability", probability(columns.suggested_probability[row])),
      cell("error", amount(columns.error[row])),
      cell("parametric_complexity", amount(columns.parametric_complexity[row])),
      cell("stochastic_complexity", make("span", { class: "value" }, amount(columns.stochastic_complexity[row])), bar(row)),
      cell("label_complexity", make("span", { class: "value" }, amount(columns.label_complexity[row]))),
      cell("surprise", `${amount(columns.surprise[row])}×`),
      cell("open", more));
    if (columns.is_suspect[row]) line.classList.add("suspect");
    return line;
  }

  function showPage() {
    const pages = pageCount();
    state.page = Math.min(Math.max(0, state.page), pages - 1);
    const start = state.page * pageSize();
    const visible = rows.slice(start, start + pageSize());
    byId("rows").replaceChildren(...visible.map(tableRow));
    byId("status").textContent = rows.length
      ? `Showing ${whole(start + 1)} to ${whole(start + visible.length)} of ${whole(rows.length)} labels, page ${whole(state.page + 1)} of ${whole(pages)}.`
      : "No label matches. Reset the filters to see all.";
    byId("page").value = state.page + 1;
    byId("page").max = pages;
    byId("of").textContent = `of ${whole(pages)}`;
    byId("first").disabled = byId("previous").disabled = state.page === 0;
    byId("last").disabled = byId("next").disabled = state.page === pages - 1;
    byId("export").disabled = rows.length === 0;
    byId("export").textContent = `Export CSV (${whole(rows.length)})`;
    showControls();
  }

  function showControls() {
    for (const header of headers) {
      if (header.dataset.column !== state.sort) header.removeAttribute("aria-sort");
      else header.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
    }
    byId("sort").value = state.sort;
    byId("direction").textContent = state.descending ? "↓ Descending" : "↑ Ascending";
    byId("as-cards").setAttribute("aria-pressed", state.cards);
    byId("as-table").setAttribute("aria-pressed", !state.cards);
    byId("labels").classList.toggle("cards", state.cards);
    for (const chip of document.querySelectorAll(".chip")) {
      chip.setAttribute("aria-pressed", chip.dataset.given === byId("given").value && chip.dataset.suggested === byId("suggested").value);
    }
  }

  // Details ---------------------------------------------------------------------------------------------------------

  let opened = 0;

  function openDetails(row) {
    opened = rows.indexOf(row);
    showDetails();
    byId("details").showModal();
    byId("details-heading").focus();
  }

  function step(by) {
    opened = Math.min(Math.max(0, opened + by), rows.length - 1);
    showDetails();
  }

  function showDetails() {
    const row = rows[opened], index = columns.index[row];
    const given = className(columns.label[row]), suggested = className(columns.suggested_label[row]);
    const preview = previewOf(row);
    byId("details-heading").textContent = `Example ${index}`;
    byId("details-previous").disabled = opened === 0;
    byId("details-next").disabled = opened === rows.length - 1;
    const verdict = make("p", { class: "verdict" }, "Labelled ", bdi(given, "label"), ", looks like ", bdi(suggested, "suggested_label"), ".");
    const name = preview && preview.name ? [make("p", { class: "caption" }, bdi(preview.name))] : [];
    const shown = preview ? [picture(preview, true)] : [];
    const head = make("div", { class: "large" }, ...shown, make("div", {}, ...name, verdict));
    byId("details-body").replaceChildren(head, facts(row), ...behind(index));
    byId("details-body").scrollTop = 0;
  }

  function facts(row) {
    const list = make("dl", { class: "facts" });
    const add = (name, value) => list.append(make("dt", {}, name), make("dd", {}, value));
    add("rank", whole(columns.rank[row]));
    add("probability of the given label", precise(columns.label_probability[row]));
    add("probability of the suggested label", precise(columns.suggested_probability[row]));
    add("error", `${precise(columns.error[row])} nats`);
    add("parametric complexity", `${precise(columns.parametric_complexity[row])} nats`);
    add("stochastic complexity", `${precise(columns.stochastic_complexity[row])} nats`);
    add("label complexity", `${precise(columns.label_complexity[row])} nats`);
    add("surprise, of a training example", `${precise(columns.surprise[row])}×`);
    add("suspect", columns.is_suspect[row] ? "yes" : "no");
    return list;
  }

  function behind(index) {
    const examples = (data.explanations[index] || []).map(([at, influence, label, preview]) => (
      { at, influence: Number(influence), label, preview: data.previews[preview] }));
    const strongest = Math.max(...examples.map((example) => Math.abs(example.influence)));
    const group = (title, kind, chosen) => (chosen.length
      ? [make("h3", {}, title), make("ul", { class: `examples ${kind}` }, ...chosen.map((example) => trainingExample(example, strongest)))]
      : []);
    const byStrength = examples.sort((a, b) => Math.abs(b.influence) - Math.abs(a.influence));
    return [
      ...group("Training examples that support the given label", "supporting", byStrength.filter((example) => example.influence > 0)),
      ...group("Training examples that contradict it", "contradicting", byStrength.filter((example) => example.influence < 0)),
    ];
  }

  function trainingExample(example, strongest) {
    const strength = make("span", { class: "strength", "aria-hidden": "true" });
    strength.style.width = `${(100 * Math.abs(example.influence)) / strongest}%`;
    return make("li", {},
      picture(example.preview, false),
      make("span", {}, bdi(className(example.label), "label"), make("span", { class: "number" }, ` #${example.at}`)),
      make("span", { class: "influence" }, `influence ${example.influence > 0 ? "+" : ""}${Number(example.influence.toPrecision(3))}`),
      strength);
  }

  // Export ----------------------------------------------------------------------------------------------------------

  /* A spreadsheet runs text that starts like a formula; an apostrophe keeps it text. */
  function quoted(text) {
    const formula = /^\s*[=+\-@\uFF1D\uFF0B\uFF0D\uFF20]|^[\t\r\n]/.test(text) && !/^[+-]?\d+(\.\d+)?$/.test(text);
    const safe = formula ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  }

  function exportText() {
    const names = Object.keys(columns);
    const field = (name, row) => {
      if (name === "is_suspect") return columns[name][row] ? "true" : "false";
      return Number.isNaN(columns[name][row]) ? "" : String(columns[name][row]);
    };
    const lines = [[...names, ...(data.named ? ["label_name", "suggested_label_name"] : []), "name"].join(",")];
    for (const row of rows) {
      const fields = names.map((name) => field(name, row));
      if (data.named) fields.push(quoted(className(columns.label[row])), quoted(className(columns.suggested_label[row])));
      const preview = previewOf(row);
      fields.push(quoted(preview ? preview.name : ""));
      lines.push(fields.join(","));
    }
    return `\uFEFF${lines.join("\r\n")}\r\n`;
  }

  function download() {
    const address = URL.createObjectURL(new Blob([exportText()], { type: "text/csv" }));
    make("a", { href: address, download: "labels.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }

  // Wiring ----------------------------------------------------------------------------------------------------------

  function sortBy(name) {
    state.descending = state.sort === name ? !state.descending : !["rank", "index", "label", "suggested_label"].includes(name);
    state.sort = name;
    refresh();
  }

  function reset() {
    byId("controls").reset();
    byId("suspects").checked = hasSuspects;
    byId("suspects").disabled = !hasSuspects;
    Object.assign(state, { sort: "rank", descending: false });
    refresh();
  }

  function turnTo(page) {
    state.page = page;
    showPage();
  }

  let waiting = 0;
  byId("query").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(refresh, 150);
  });
  for (const id of ["given", "suggested", "suspects"]) byId(id).addEventListener("change", refresh);
  for (const chip of document.querySelectorAll(".chip")) {
    chip.addEventListener("click", () => {
      const chosen = chip.getAttribute("aria-pressed") === "true";
      byId("given").value = chosen ? "" : chip.dataset.given;
      byId("suggested").value = chosen ? "" : chip.dataset.suggested;
      refresh();
    });
  }
  for (const header of headers) {
    header.firstElementChild.addEventListener("click", () => sortBy(header.dataset.column));
  }
  byId("sort").addEventListener("change", () => sortBy(byId("sort").value));
  byId("direction").addEventListener("click", () => sortBy(state.sort));
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("clear").addEventListener("click", reset);
  byId("as-cards").addEventListener("click", () => { state.cards = true; showControls(); });
  byId("as-table").addEventListener("click", () => { state.cards = false; showControls(); });
  byId("export").addEventListener("click", download);
  byId("first").addEventListener("click", () => turnTo(0));
  byId("previous").addEventListener("click", () => turnTo(state.page - 1));
  byId("next").addEventListener("click", () => turnTo(state.page + 1));
  byId("last").addEventListener("click", () => turnTo(pageCount() - 1));
  byId("page").addEventListener("change", () => turnTo((Number(byId("page").value) || 1) - 1));
  byId("size").addEventListener("change", () => turnTo(0));
  byId("details-previous").addEventListener("click", () => step(-1));
  byId("details-next").addEventListener("click", () => step(1));
  byId("details-close").addEventListener("click", () => byId("details").close());
  byId("details").addEventListener("click", (event) => { if (event.target === byId("details")) byId("details").close(); });
  byId("details").addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") step(-1);
    if (event.key === "ArrowRight") step(1);
  });
  reset();
})();
