// Why: what the model looked at, below its answer.

function whyButton(item, name, view) {
  const properties = { type: "button", className: "main", dataset: { key: `why-${name}` } };
  const button = make("button", properties, view.why ? "Hide why" : "Why?");
  button.onclick = () => {
    if (!view.why) return explain(item, name, "");
    view.why = null;
    showCard(item, name);
  };
  return button;
}

async function explain(item, name, of) {
  const view = viewOf(item, name), asked = { tab: 0, strength: 1, told: null, ...view.why, waiting: true, error: null };
  view.why = asked;
  showCard(item, name);
  try {
    const path = `/explain?model=${encodeURIComponent(name)}&of=${encodeURIComponent(of)}`;
    const { status, told } = await request("POST", path, item.file);
    if (view.why !== asked) return; // closed meanwhile, or asked again
    Object.assign(asked, { waiting: false, told: status === 200 ? told : null, error: told.error });
    tell(told.error ?? `Why ${told.of || item.name}: ${told.sheets.map(sheet => sheet.title).join(", ")}`);
    showWhy(item, name);
  } catch (error) {
    if (!(error instanceof Away)) throw error;
    view.why = null;
    showCard(item, name);
    waitForServer();
  }
}

function showWhy(item, name) {
  const old = cardOf(item, name)?.querySelector(".why");
  if (old) replace(old, whyPanel(item, name, viewOf(item, name)));
}

function whyPanel(item, name, view) {
  const { waiting, told, error } = view.why;
  const panel = make("div", { className: "why" });
  if (waiting) panel.append(make("p", { className: "soft" }, "Looking inside …"));
  if (error) panel.append(make("p", { className: "problem" }, sentence(error)));
  if (!told) return panel;
  view.why.tab = Math.min(view.why.tab, told.sheets.length - 1);
  const tabs = make("div", { className: "tabs" }, ...told.sheets.map((sheet, i) => tabButton(item, name, sheet, i)));
  tabs.setAttribute("role", "tablist");
  tabs.setAttribute("aria-label", "Ways to look inside");
  panel.append(tabs);
  if (told.sheets.length) panel.append(sheetPanel(item, name, view.why));
  if (told.notes.length) panel.append(make("p", { className: "under" }, told.notes.join(" ")));
  return panel;
}

function tabButton(item, name, sheet, number) {
  const { why } = viewOf(item, name), id = idOf(`tab-${number}`, name);
  const button = make("button", { type: "button", id, tabIndex: number === why.tab ? 0 : -1 }, sheet.title);
  button.setAttribute("role", "tab");
  button.setAttribute("aria-selected", String(number === why.tab));
  if (number === why.tab) button.setAttribute("aria-controls", idOf("sheet", name));
  const turn = to => { why.tab = to; showWhy(item, name); $(idOf(`tab-${to}`, name))?.focus(); };
  button.onclick = () => turn(number);
  button.onkeydown = event => {
    const last = why.told.sheets.length - 1;
    const to = { ArrowRight: Math.min(last, number + 1), ArrowLeft: Math.max(0, number - 1), Home: 0, End: last };
    if (event.altKey || !(event.key in to)) return;
    event.preventDefault();
    turn(to[event.key]);
  };
  return button;
}

function sheetPanel(item, name, why) {
  const sheet = why.told.sheets[why.tab];
  const body = make("div", { id: idOf("sheet", name), tabIndex: 0 });
  body.setAttribute("role", "tabpanel");
  body.setAttribute("aria-labelledby", idOf(`tab-${why.tab}`, name));
  const rows = make("div", { className: "sheet" }, ...sheet.rows.map(row => sheetRow(row, sheet, why)));
  const tools = make("div", { className: "sheet-tools row" }, strength(rows, name, why));
  if (sheet.kind === "grad-cam" && why.told.of) tools.append(classChoice(item, name, why.told.of));
  body.append(make("p", { className: "reading" }, sheet.reading), tools, rows);
  return body;
}

function strength(rows, name, why) {
  const fade = value => {
    why.strength = value;
    for (const image of rows.querySelectorAll("img + img")) image.style.opacity = value;
  };
  const label = slider("strength", why.strength, fade, `strength-${name}`);
  label.querySelector("input").disabled = why.waiting; // it will be replaced, and must not be held then
  return label;
}

function classChoice(item, name, of) {
  const options = modelOf(name).classes.map(value => make("option", { value, selected: value === of }, value));
  const select = make("select", { id: idOf("of", name), dataset: { key: `of-${name}` } }, ...options);
  select.onchange = () => explain(item, name, select.value);
  return make("span", { className: "row together" }, make("label", { htmlFor: select.id }, "for the class"), select);
}

function sheetRow(row, sheet, why) {
  const single = sheet.kind === "grad-cam" || sheet.kind === "rollout";
  const panels = row.panels.filter((panel, i) => !(single && i === 0) && panel.caption !== "picture");
  const box = make("div", { className: single ? "panels large" : "panels" }, ...panels.map(panel => {
    const above = make("img", { src: panel.picture, alt: `${sheet.title}: ${panel.caption}` });
    above.style.opacity = why.strength;
    const pair = make("div", { className: "pair" }, make("img", { src: why.told.picture, alt: "" }), above);
    return make("figure", {}, pair, make("figcaption", {}, panel.caption));
  }));
  return make("div", {}, single ? null : make("h3", {}, row.name.replace("\n", ", ")), box);
}
