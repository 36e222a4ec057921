// What can be taken home: a table, COCO's JSON, pictures.

function save(name, blob) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A cell of a table; programs that compute with tables take what begins with = for a formula. */
function cell(value) {
  let text = String(value ?? "");
  if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = "'" + text;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** All answers of the session as rows of a table: one for each label, class or object. */
function csvOf(items) {
  const rows = [["picture", "model", "class", "value", "left", "top", "width", "height", "error"]];
  for (const item of items)
    for (const [model, told] of Object.entries(item.answers)) {
      const row = (label, value, box = ["", "", "", ""]) => rows.push([item.name, model, label, value, ...box, ""]);
      if (told.error) rows.push([item.name, model, "", "", "", "", "", "", told.error]);
      told.labels?.forEach((label, i) => row(label, told.probabilities[i]));
      for (const [label, part] of Object.entries(told.shares ?? {})) row(label, part);
      told.objects?.forEach(one => row(one.category_name, one.score, one.bbox));
    }
  return rows.map(row => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

/** Masks and objects of one model as a COCO file. */
async function cocoOf(items, model) {
  const images = [], annotations = [];
  for (const item of items) {
    const told = item.answers[model.name];
    if (!told?.size) continue;
    const [height, width] = told.size;
    images.push({ id: images.length + 1, file_name: item.name, width, height });
    const found = told.objects ?? regionsOf(await readMask(told, model), told.size, model);
    for (const one of found) {
      const area = one.bbox[2] * one.bbox[3];
      annotations.push({ id: annotations.length + 1, image_id: images.length, iscrowd: 0, area, ...one });
    }
  }
  const categories = model.classes.map((name, i) => ({ id: i + 1, name }));
  return JSON.stringify({ images, annotations, categories });
}

/** Each class of a mask but the background as one annotation, with runs that go down the columns. */
function regionsOf(classes, [height, width], model) {
  const found = [];
  for (const label of new Set(classes)) {
    if (model.background.includes(label)) continue;
    const counts = [];
    let run = 0, on = false, left = width, top = height, right = 0, bottom = 0, area = 0;
    for (let x = 0; x < width; x++)
      for (let y = 0; y < height; y++) {
        const here = classes[y * width + x] === label;
        if (here !== on) { counts.push(run); run = 0; on = here; }
        run++;
        if (!here) continue;
        area++;
        left = Math.min(left, x); right = Math.max(right, x + 1);
        top = Math.min(top, y); bottom = Math.max(bottom, y + 1);
      }
    counts.push(run);
    const names = { category_id: label + 1, category_name: model.classes[label] };
    const bbox = [left, top, right - left, bottom - top];
    found.push({ ...names, area, bbox, segmentation: { size: [height, width], counts } });
  }
  return found;
}

/** A file for each chosen model that has masks or objects. */
async function saveCoco() {
  for (const name of chosen()) {
    if (!state.items.some(item => item.answers[name]?.size)) continue;
    const text = await cocoOf(state.items, modelOf(name));
    save(`weft-${name.replaceAll("/", "-")}.json`, new Blob([text], { type: "application/json" }));
  }
}
