"""An agent that knows nothing but HTTP: what it does is its first word."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request


def opened(messages, **fields):
    """The answer to a request, not read yet."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "gpt", "messages": messages, "max_tokens": 6, "top_p": 0.9, **fields}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    return urllib.request.urlopen(request, timeout=60)


def ask(messages, **fields):
    """The message that answers, as it is sent back."""
    with opened(messages, **fields) as answer:
        message = json.load(answer)["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"]}


def main(what):
    problem = json.load(sys.stdin)
    messages = [{"role": "user", "content": problem["prompt"]}]
    if what == "quiet":
        return
    messages += [ask(messages), {"role": "user", "content": "go on"}]
    if what == "crash":
        raise SystemExit("no idea")
    if what == "hang":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)
    if what == "endless":
        try:
            while True:
                messages += [ask(messages), {"role": "user", "content": "more"}]
        except urllib.error.HTTPError as error:
            print(json.load(error)["error"]["code"], file=sys.stderr)
    if what == "leave":
        with opened(messages, max_tokens=60, stream=True) as answer:
            answer.read(1)
    ask(messages) if what != "endless" else None
    if what == "branch":
        ask(messages, temperature=0.1)
        ask([{"role": "system", "content": "Check."}, *messages[:1]])
    print("done")
    print(json.dumps({"reward": len(problem["answer"]) / 4}))


main(sys.argv[1])
