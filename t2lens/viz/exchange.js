// Where answers meet the maps that asked. A part of the module that maps.js describes, and a module of its own, so that
// the mount of answers need not carry the renderer.

// Answers arrive in a mount of their own, perhaps before the maps: they meet by the payload's rev. What waits for maps
// that never come is dropped when four others wait.
const EXCHANGE = (globalThis.t2lensExchange ??= { views: new Set(), waiting: new Map() });
function deliver({ of, answers }) {
  const views = [...EXCHANGE.views].filter((view) => view.rev === of);
  for (const view of views) view.take(answers);
  if (views.length) return;
  EXCHANGE.waiting.delete(of);
  EXCHANGE.waiting.set(of, answers);
  while (EXCHANGE.waiting.size > 4) EXCHANGE.waiting.delete(EXCHANGE.waiting.keys().next().value);
}
