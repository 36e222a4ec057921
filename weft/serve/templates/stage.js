// The stage: one picture, with a card for each chosen model. What changes is replaced, and nothing around it: a
// slider that somebody holds stays where it is.

/** The switches of one picture and one model. */
function viewOf(item, name) {
  if (!item.views[name]) {
    const model = modelOf(name);
    const shown = new Set(model.classes.keys());
    for (const plain of model.background) shown.delete(plain);
    item.views[name] = { shown, alpha: 0.5, score: 0.5, classes: null, reading: false, why: null };
  }
  return item.views[name];
}

function answerOf(item, name) {
  const told = item.answers[name];
  return told && !told.error ? told : null;
}

/** An answer in a few words. */
function summary(item, name) {
  const told = item.answers[name];
  if (!told) return { text: "…", bad: false };
  if (told.error) return { text: told.error, bad: true };
  if (told.labels) return { text: `${told.labels[0]} ${percent(told.probabilities[0])}`, bad: false };
  if (told.shares) return { text: largest(told.shares, modelOf(name)), bad: false };
  const sure = told.objects.filter(one => one.score >= 0.5).length;
  return { text: `${sure} ${sure === 1 ? "object" : "objects"}`, bad: false };
}

function largest(shares, { classes, background }) {
  const isOne = ([label]) => !background.includes(classes.indexOf(label));
  const [label, part] = Object.entries(shares).find(isOne) ?? ["nothing", 1];
  return `${label} ${percent(part)}`;
}

const sentence = text => text[0].toUpperCase() + text.slice(1) + (/[.!?…]$/.test(text) ? "" : ".");

// What changes -----------------------------------------------------------------------------------------------------

/** All of it: another picture, or another choice of models. */
function show() {
  $("drop").classList.toggle("less", state.items.length > 0);
  const item = currentItem(), names = item ? chosen() : [];
  $("stage").hidden = !item;
  $("stage").classList.toggle("two", names.length > 1);
  $("stage").replaceChildren(...names.map(name => card(item, name)));
  for (const name of names) repaint(item, name);
}

function cardOf(item, name) {
  if (item.id !== state.current) return null;
  return [...$("stage").children].find(element => element.dataset.model === name);
}

function showCard(item, name) {
  const old = cardOf(item, name);
  if (!old) return;
  replace(old, card(item, name));
  repaint(item, name);
}

/** Puts an element in another's place; whoever was on a control of the old is on that of the new. */
function replace(old, fresh) {
  const key = old.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  old.replaceWith(fresh);
  if (key) fresh.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
}

function showProgress(item, name) {
  cardOf(item, name)?.querySelector(".waits")?.replaceWith(waits(item, name));
}

function showAnswer(item, name) {
  showEntry(item);
  showSaves();
  showCard(item, name);
}

function showPicture(item) {
  showEntry(item);
  for (const name of chosen()) {
    const under = cardOf(item, name)?.querySelector(".under");
    if (under) under.textContent = caption(item, name);
    repaint(item, name);
  }
}

/** Draws the picture and what the model says of it, if they are on the stage. */
function repaint(item, name) {
  const canvas = cardOf(item, name)?.querySelector("canvas");
  if (!canvas) return;
  const answer = answerOf(item, name), model = modelOf(name), view = viewOf(item, name);
  if (answer?.mask && !view.reading) {
    view.reading = true;
    readMask(answer, model).then(classes => { view.classes = classes; repaint(item, name); });
  }
  canvas.hidden = item.blank && !answer?.size; // nothing to be seen
  paint(canvas, pictureOf(item), answer?.size ?? item.size ?? [240, 320], answer, model, view);
}

// A card -----------------------------------------------------------------------------------------------------------

function card(item, name) {
  const model = modelOf(name), view = viewOf(item, name);
  const about = `${model.architecture}, ${(model.parameters / 1e6).toFixed(1)} M parameters`;
  const head = make("h2", { id: idOf("view", name) }, name, " ", make("span", { className: "soft" }, about));
  const canvas = make("canvas", { dataset: { name } });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${item.name}: ${summary(item, name).text}`);
  const frame = make("div", { className: "frame" }, canvas, item.answers[name] ? null : waits(item, name));
  const left = make("div", {}, frame, make("p", { className: "under" }, caption(item, name)));
  const right = make("div", {}, ...findings(item, name, canvas));
  const inside = make("div", { className: "inside" }, left, right);
  const whole = make("section", { className: "card view", dataset: { model: name } }, head, inside);
  whole.setAttribute("aria-labelledby", head.id);
  if (view.why) whole.append(whyPanel(item, name, view));
  return whole;
}

function caption(item, name) {
  const told = item.answers[name];
  const size = told?.size ? `${told.size[1]} × ${told.size[0]}` : null;
  const unseen = item.blank && item.file ? "this browser cannot show the file" : null;
  return [item.name, size, ...(told?.notes ?? []), unseen].filter(Boolean).join(" · ");
}

function waits(item, name) {
  const part = item.progress[name];
  const bar = make("progress", part === undefined || part >= 1 ? {} : { value: part });
  const text = waitingFor(part);
  bar.setAttribute("aria-label", text);
  return make("div", { className: "waits" }, text, bar);
}

function waitingFor(part) {
  if (state.away) return "Waiting for the server";
  if (part === undefined) return "Waiting";
  return part < 1 ? `Sending, ${Math.round(100 * part)} %` : "Looking at it";
}

function findings(item, name, canvas) {
  const told = item.answers[name], answer = answerOf(item, name);
  if (told?.error) return [make("p", { className: "problem" }, sentence(told.error))];
  if (!answer) return [];
  const found = answer.labels ? [bars(answer)] : answer.shares ? [shares(item, name)] : objectTools(item, name);
  return [...found, actions(item, name, canvas)];
}

function bar(part, colour = "") {
  const fill = make("i");
  fill.style.width = `${100 * part}%`;
  fill.style.background = colour;
  return make("span", { className: "bar" }, fill);
}

function bars({ labels, probabilities }) {
  return make("ol", { className: "bars" }, ...labels.map((label, i) => make("li", {},
    make("span", { className: "name" }, label),
    make("span", { className: "value" }, percent(probabilities[i])),
    bar(probabilities[i]))));
}

/** A switch for each class: [position, what is said beside it, the length of its bar]. */
function switches(item, name, rows) {
  return make("ul", { className: "bars" }, ...rows.map(([position, said, part]) => make("li", {},
    classSwitch(item, name, position),
    make("span", { className: "value" }, said),
    bar(part, modelOf(name).colours[position]))));
}

function classSwitch(item, name, position) {
  const model = modelOf(name), { shown } = viewOf(item, name), key = `class-${name}-${position}`;
  const box = make("input", { type: "checkbox", checked: shown.has(position), dataset: { key } });
  box.onchange = () => { box.checked ? shown.add(position) : shown.delete(position); repaint(item, name); };
  const dot = make("span", { className: "dot" });
  dot.style.background = model.colours[position];
  return make("label", {}, box, dot, make("span", { className: "name" }, model.classes[position]));
}

function shares(item, name) {
  const { classes } = modelOf(name), parts = Object.entries(answerOf(item, name).shares);
  return switches(item, name, parts.map(([label, part]) => [classes.indexOf(label), percent(part), part]));
}

function objectTools(item, name) {
  const view = viewOf(item, name), list = make("div", {});
  const fill = () => list.replaceChildren(objectCounts(item, name));
  fill();
  const change = value => { view.score = value; fill(); repaint(item, name); };
  const range = slider("at least so sure", view.score, change, `score-${name}`);
  return [list, make("div", { className: "tools row" }, range)];
}

function objectCounts(item, name) {
  const sure = answerOf(item, name).objects.filter(one => one.score >= viewOf(item, name).score);
  if (!sure.length) return make("p", { className: "soft" }, "Nothing that the model is so sure of.");
  const counts = new Map();
  for (const one of sure) counts.set(one.category_id - 1, (counts.get(one.category_id - 1) ?? 0) + 1);
  const sorted = [...counts].sort((a, b) => b[1] - a[1]), most = sorted[0][1];
  return switches(item, name, sorted.map(([position, n]) => [position, String(n), n / most]));
}

function slider(text, value, change, key) {
  const input = make("input", { type: "range", min: 0, max: 1, step: 0.05, value, dataset: { key } });
  input.oninput = () => change(Number(input.value));
  return make("label", { className: "row" }, text, input);
}

function actions(item, name, canvas) {
  const view = viewOf(item, name), row = make("div", { className: "actions row" });
  const fade = value => { view.alpha = value; repaint(item, name); };
  if (!answerOf(item, name).labels) row.append(slider("opacity", view.alpha, fade, `alpha-${name}`));
  if (item.file) row.append(whyButton(item, name, view));
  const png = make("button", { type: "button", className: "plain", dataset: { key: `png-${name}` } }, "Save PNG");
  png.setAttribute("aria-label", `Save PNG of ${item.name} with its overlay`);
  png.onclick = () => canvas.toBlob(blob => save(`${item.name.replace(/\.[^.]*$/, "")}.overlay.png`, blob));
  row.append(png);
  return row;
}
