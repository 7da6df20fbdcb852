// What the maps ask for after the payload, and where the answers come in. One part of the module that maps.js describes.

const ANSWERS = 64; // that one payload keeps: some 50 MB at 2,048 tokens and 97 rows
const WANT = {
  // what tells two wants of a kind apart
  rollout: ["panel", "pos", "site", "way"],
  effects: ["panel", "pos", "site", "way"],
  column: ["panel", "pos"],
  row: ["panel", "pos", "site"],
  grid: ["panel", "way", "quantity"],
};
const wantKey = (kind, want) => [kind, ...WANT[kind].map((part) => want[part] ?? "")].join("|");

// The answers to one payload: the last ANSWERS that were used.
class Answers {
  constructor() {
    this.kept = new Map();
  }
  add(answer) {
    if (!answer || !WANT[answer.kind]) return;
    const key = wantKey(answer.kind, answer);
    this.kept.delete(key);
    this.kept.set(key, answer);
    while (this.kept.size > ANSWERS) this.kept.delete(this.kept.keys().next().value);
  }
  get(kind, want) {
    const key = wantKey(kind, want),
      found = this.kept.get(key);
    if (found) {
      this.kept.delete(key);
      this.kept.set(key, found);
    }
    return found;
  }
}
