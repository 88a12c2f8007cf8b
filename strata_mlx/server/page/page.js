// Puts the parts of the page together.

import { onKeyNeeded } from "./api.js";
import { startChat } from "./chat.js";
import { find, write } from "./dom.js";
import { startLive } from "./live.js";

onKeyNeeded(
  (refused) =>
    new Promise((resolve) => {
      const dialog = find("key-dialog");
      write(find("key-error"), refused ? "That key was refused." : "");
      find("key").value = "";
      dialog.addEventListener("close", () => resolve(find("key").value), { once: true });
      dialog.showModal();
    }),
);

startChat();
startLive();
find("message").focus();
