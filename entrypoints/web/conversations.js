// The conversations that this browser keeps, in its database: pictures in them are large.

const STORE = "conversations";
const MOST = 100; // The oldest give way.

let opening = null;

/** The database, or null in a browser that keeps nothing: the page works, and forgets. */
function database() {
  opening ??= new Promise((resolve) => {
    const request = indexedDB.open("jackfield", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  }).catch(() => null);
  return opening;
}

/** The result of one operation on the store, once it is on disk. */
async function done(mode, operation) {
  const db = await database();
  if (!db) return undefined;
  return new Promise((resolve, reject) => {
    const transaction = db.transaction(STORE, mode);
    const request = operation(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error ?? request.error);
  });
}

/** What is kept, the latest first, without its messages. */
export async function conversations() {
  const all = (await done("readonly", (store) => store.getAll())) ?? [];
  return all.map(({ id, title, at }) => ({ id, title, at })).sort((a, b) => b.at - a.at);
}

export const conversation = (id) => done("readonly", (store) => store.get(id));

export const forget = (id) => done("readwrite", (store) => store.delete(id));

/** Keep one, in the place of older ones where there is no room. Returns whether it is kept. */
export async function keepConversation(one) {
  for (;;) {
    try {
      await done("readwrite", (store) => store.put(one));
      for (const { id } of (await conversations()).slice(MOST)) await forget(id);
      return true;
    } catch {
      const oldest = (await conversations()).findLast(({ id }) => id !== one.id);
      if (!oldest) return false;
      await forget(oldest.id);
    }
  }
}
