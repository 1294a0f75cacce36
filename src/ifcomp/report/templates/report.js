(() => {
  "use strict";

  const byId = (id) => document.getElementById(id);

  /* Create an element with attributes and children. Strings become text nodes and are never parsed as HTML. */
  function element(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  // Light and dark --------------------------------------------------------------------------------------------------

  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const updateThemeButton = () => byId("theme").setAttribute("aria-pressed", isDark());
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    updateThemeButton();
  });
  prefersDark.addEventListener("change", updateThemeButton);
  updateThemeButton();

  if (!byId("data")) return;

  // Data ------------------------------------------------------------------------------------------------------------

  const data = JSON.parse(byId("data").textContent);
  const columns = data.columns;
  const hasComplexity = "label_complexity" in columns;
  for (const name of ["score", "p_label", "p_suggested", ...(hasComplexity ? ["label_complexity"] : [])]) {
    columns[name] = Float64Array.from(columns[name], (value) => (value === null ? NaN : Number(value)));
  }
  const total = columns.rank.length;
  const classOrder = new Float64Array(data.classes.length);
  data.classes
    .map((name, position) => [name, position])
    .sort(([a], [b]) => a.localeCompare(b, undefined, { numeric: true }))
    .forEach(([, position], place) => { classOrder[position] = place; });
  const className = (label) => data.classes[label];
  const previewOf = (row) => data.previews[data.shown[columns.index[row]]];
  const searchTexts = new Map();
  for (let row = 0; row < total; row++) {
    const preview = previewOf(row);
    if (!preview) continue;
    const body = preview.kind === "text" ? preview.content : preview.kind === "row" ? preview.content.flat().join(" ") : "";
    searchTexts.set(row, `${preview.name} ${body}`.toLowerCase());
  }

  // Number formats --------------------------------------------------------------------------------------------------

  const formatInteger = (value) => value.toLocaleString("en-US");
  function formatProbability(value) {
    if (value < 0.001) return "<0.001";
    return value > 0.999 ? ">0.999" : value.toFixed(3);
  }
  function formatNumber(value) {
    if (Number.isNaN(value)) return "–";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    const size = Math.abs(value);
    if (size > 0 && size < 0.01) return value > 0 ? "<0.01" : ">−0.01";
    return size >= 1000 ? formatInteger(Math.round(value)) : value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
  }
  const formatPrecisely = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(5))) : formatNumber(value));

  // State: sort order, page and layout; rows that match the filters -------------------------------------------------

  const hasSuspects = columns.is_suspect.includes(1);
  const images = data.previews.some((preview) => preview.kind === "image");
  const state = { sort: "rank", descending: false, page: 0, cards: images || matchMedia("(max-width: 760px)").matches };
  let rows = [];

  function filteredRows() {
    const given = byId("given").value, suggested = byId("suggested").value;
    const suspects = byId("suspects").checked;
    const query = byId("query").value.trim().toLowerCase();
    const named = data.classes.map((name) => name.toLowerCase().includes(query));
    const matches = [];
    for (let row = 0; row < total; row++) {
      const label = columns.label[row], other = columns.suggested[row];
      if (suspects && !columns.is_suspect[row]) continue;
      if (given !== "" && label !== Number(given)) continue;
      if (suggested !== "" && other !== Number(suggested)) continue;
      if (query && !named[label] && !named[other] && String(columns.index[row]) !== query
        && !(searchTexts.get(row) || "").includes(query)) continue;
      matches.push(row);
    }
    return matches;
  }

  function sortedRows(matches) {
    const isClass = state.sort === "label" || state.sort === "suggested";
    const column = columns[state.sort];
    const sign = state.descending ? -1 : 1;
    const key = (row) => {
      const value = isClass ? classOrder[column[row]] : column[row];
      return Number.isNaN(value) ? Infinity : sign * value;
    };
    const keys = new Float64Array(total);
    for (const row of matches) keys[row] = key(row);
    return matches.sort((a, b) => (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : a - b));
  }

  const pageSize = () => Number(byId("size").value);
  const pageCount = () => Math.max(1, Math.ceil(rows.length / pageSize()));

  function refresh() {
    rows = sortedRows(filteredRows());
    state.page = 0;
    renderPage();
  }

  // Table -----------------------------------------------------------------------------------------------------------

  function previewElement(preview, large) {
    if (!preview) return element("span", { class: "nothing", "aria-hidden": "true" });
    if (preview.kind === "image") {
      return element("img", { class: "thumb", src: preview.content, alt: preview.name, decoding: "async" });
    }
    if (preview.kind === "text") return element("p", { class: large ? "text" : "text short", dir: "auto" }, preview.content);
    const fields = large ? preview.content : preview.content.slice(0, 4);
    const items = fields.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
    return element("dl", { class: "fields" }, ...items);
  }

  const headers = [...document.querySelectorAll("#table th[data-column]")];
  const titles = Object.fromEntries(headers.map((header) => [header.dataset.column, header.textContent]));
  const cell = (name, ...children) => (
    element("td", { role: "cell", class: name, "data-title": titles[name] || "" }, ...children));

  const bdi = (text, kind = "") => element("bdi", { class: kind }, text);

  function tableRow(row) {
    const preview = previewOf(row), index = columns.index[row];
    const name = preview && preview.name ? [bdi(preview.name, "name")] : [];
    const caption = element("span", { class: "caption" }, ...name, element("span", { class: "number" }, `#${index}`));
    const more = element("button", { type: "button", class: "more", "aria-label": `Details of example ${index}` }, "Details");
    more.addEventListener("click", () => openDetails(row));
    const line = element("tr", { role: "row" },
      cell("rank", formatInteger(columns.rank[row])),
      cell("index", element("div", { class: "example" }, previewElement(preview, false), caption)),
      cell("label", bdi(className(columns.label[row]))),
      cell("suggested", bdi(className(columns.suggested[row]))),
      cell("p_label", formatProbability(columns.p_label[row])),
      cell("p_suggested", formatProbability(columns.p_suggested[row])),
      cell("score", element("span", { class: "value" }, formatNumber(columns.score[row]))),
      ...(hasComplexity ? [cell("label_complexity", formatNumber(columns.label_complexity[row]))] : []),
      cell("open", more));
    if (columns.is_suspect[row]) line.classList.add("suspect");
    return line;
  }

  function renderPage() {
    const pages = pageCount();
    state.page = Math.min(Math.max(0, state.page), pages - 1);
    const start = state.page * pageSize();
    const visible = rows.slice(start, start + pageSize());
    byId("rows").replaceChildren(...visible.map(tableRow));
    byId("status").textContent = rows.length
      ? `Showing ${formatInteger(start + 1)} to ${formatInteger(start + visible.length)} of ${formatInteger(rows.length)} `
        + `labels, page ${formatInteger(state.page + 1)} of ${formatInteger(pages)}.`
      : "No label matches. Reset the filters to see all.";
    byId("page").value = state.page + 1;
    byId("page").max = pages;
    byId("of").textContent = `of ${formatInteger(pages)}`;
    byId("first").disabled = byId("previous").disabled = state.page === 0;
    byId("last").disabled = byId("next").disabled = state.page === pages - 1;
    byId("export").disabled = rows.length === 0;
    byId("export").textContent = `Export CSV (${formatInteger(rows.length)})`;
    updateControls();
  }

  function updateControls() {
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
    renderDetails();
    byId("details").showModal();
    byId("details-heading").focus();
  }

  function step(by) {
    opened = Math.min(Math.max(0, opened + by), rows.length - 1);
    renderDetails();
  }

  function renderDetails() {
    const row = rows[opened], index = columns.index[row];
    const given = className(columns.label[row]), suggested = className(columns.suggested[row]);
    const preview = previewOf(row);
    byId("details-heading").textContent = `Example ${index}`;
    byId("details-previous").disabled = opened === 0;
    byId("details-next").disabled = opened === rows.length - 1;
    const verdict = element("p", { class: "verdict" }, "Labelled ", bdi(given, "label"), ", looks like ", bdi(suggested, "suggested"), ".");
    const name = preview && preview.name ? [element("p", { class: "caption" }, bdi(preview.name))] : [];
    const shown = preview ? [previewElement(preview, true)] : [];
    const head = element("div", { class: "large" }, ...shown, element("div", {}, ...name, verdict));
    byId("details-body").replaceChildren(head, factList(row), ...neighbourLists(index), ...explanationLists(index));
    byId("details-body").scrollTop = 0;
  }

  function factList(row) {
    const list = element("dl", { class: "facts" });
    const add = (name, value) => list.append(element("dt", {}, name), element("dd", {}, value));
    add("rank", formatInteger(columns.rank[row]));
    add("score", `${formatPrecisely(columns.score[row])} nats`);
    add("probability of the given label", formatPrecisely(columns.p_label[row]));
    add("probability of the suggested label", formatPrecisely(columns.p_suggested[row]));
    if (hasComplexity) add("label complexity", `${formatPrecisely(columns.label_complexity[row])} nats`);
    add("suspect", columns.is_suspect[row] ? "yes" : "no");
    return list;
  }

  function neighbourLists(index) {
    return (data.neighbours[index] || []).flatMap(([layer, weight, examples]) => [
      element("h3", {}, "Nearest examples in layer ", bdi(layer), ` (weight ${weight.toFixed(2)})`),
      element("ul", { class: "examples neighbours" }, ...examples.map(([position, label, preview]) => (
        element("li", {}, previewElement(data.previews[preview], false), exampleCaption(label, position))))),
    ]);
  }

  const exampleCaption = (label, position) => (
    element("span", {}, bdi(className(label), "label"), element("span", { class: "number" }, ` #${position}`)));

  function explanationLists(index) {
    const examples = (data.explanations[index] || []).map(([position, influence, label, preview]) => (
      { position, influence: Number(influence), label, preview: data.previews[preview] }));
    const strongest = Math.max(...examples.map((example) => Math.abs(example.influence)));
    const group = (title, kind, chosen) => (chosen.length
      ? [element("h3", {}, title), element("ul", { class: `examples ${kind}` }, ...chosen.map((example) => trainingExampleItem(example, strongest)))]
      : []);
    const byStrength = examples.sort((a, b) => Math.abs(b.influence) - Math.abs(a.influence));
    return [
      ...group("Training examples that support the given label", "supporting", byStrength.filter((example) => example.influence > 0)),
      ...group("Training examples that contradict it", "contradicting", byStrength.filter((example) => example.influence < 0)),
    ];
  }

  function trainingExampleItem(example, strongest) {
    const strength = element("span", { class: "strength", "aria-hidden": "true" });
    strength.style.width = `${(100 * Math.abs(example.influence)) / strongest}%`;
    return element("li", {},
      previewElement(example.preview, false),
      exampleCaption(example.label, example.position),
      element("span", { class: "influence" }, `influence ${example.influence > 0 ? "+" : ""}${Number(example.influence.toPrecision(3))}`),
      strength);
  }

  // Export ----------------------------------------------------------------------------------------------------------

  /* Spreadsheets evaluate text that starts like a formula; an apostrophe before it prevents that. */
  function csvField(text) {
    const formula = /^\s*[=+\-@\uFF1D\uFF0B\uFF0D\uFF20]|^[\t\r\n]/.test(text) && !/^[+-]?\d+(\.\d+)?$/.test(text);
    const safe = formula ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  }

  function csvText() {
    const names = Object.keys(columns);
    const field = (name, row) => {
      if (name === "is_suspect") return columns[name][row] ? "true" : "false";
      return Number.isNaN(columns[name][row]) ? "" : String(columns[name][row]);
    };
    const lines = [[...names, ...(data.named ? ["label_name", "suggested_name"] : []), "name"].join(",")];
    for (const row of rows) {
      const fields = names.map((name) => field(name, row));
      if (data.named) fields.push(csvField(className(columns.label[row])), csvField(className(columns.suggested[row])));
      const preview = previewOf(row);
      fields.push(csvField(preview ? preview.name : ""));
      lines.push(fields.join(","));
    }
    return `\uFEFF${lines.join("\r\n")}\r\n`;
  }

  function download() {
    const address = URL.createObjectURL(new Blob([csvText()], { type: "text/csv" }));
    element("a", { href: address, download: "labels.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }

  // Event handlers --------------------------------------------------------------------------------------------------

  function sortBy(name) {
    state.descending = state.sort === name ? !state.descending : !["rank", "index", "label", "suggested"].includes(name);
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

  function goToPage(page) {
    state.page = page;
    renderPage();
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
  byId("as-cards").addEventListener("click", () => { state.cards = true; updateControls(); });
  byId("as-table").addEventListener("click", () => { state.cards = false; updateControls(); });
  byId("export").addEventListener("click", download);
  byId("first").addEventListener("click", () => goToPage(0));
  byId("previous").addEventListener("click", () => goToPage(state.page - 1));
  byId("next").addEventListener("click", () => goToPage(state.page + 1));
  byId("last").addEventListener("click", () => goToPage(pageCount() - 1));
  byId("page").addEventListener("change", () => goToPage((Number(byId("page").value) || 1) - 1));
  byId("size").addEventListener("change", () => goToPage(0));
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
