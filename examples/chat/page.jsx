// The page of one chat, which its address names.

import { useChat } from "@ai-sdk/react";
import { useEffect } from "react";
import { createRoot } from "react-dom/client";

const id = location.pathname.slice(1);
const earlier = await (await fetch(`/api/chat/${id}`)).json();

function Chat() {
  // `resume` asks at the start for an answer that is still being written.
  const resume = earlier.at(-1)?.role === "user";
  const { messages, sendMessage, error, resumeStream } = useChat({ id, messages: earlier, resume });
  const isRefused = error?.message.startsWith("refused");
  useEffect(() => {
    if (!error || isRefused) return;
    const timer = setTimeout(resumeStream, 1000); // the answer goes on without us
    return () => clearTimeout(timer);
  }, [error]);

  function ask(event) {
    event.preventDefault();
    sendMessage({ text: event.target.question.value });
    event.target.reset();
  }

  return (
    <>
      {messages.map(({ id, role, parts }) => (
        <p key={id} className={role}>
          {parts.map((part) => (part.type === "text" ? part.text : ""))}
        </p>
      ))}
      {isRefused && <p>{error.message}</p>}
      <form onSubmit={ask}>
        <input name="question" autoFocus />
      </form>
    </>
  );
}

createRoot(document.querySelector("main")).render(<Chat />);
