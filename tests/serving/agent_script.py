"""An agent that knows nothing but HTTP: what it does is its first word."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request


def opened(messages, **fields):
    """The answer to a request, not read yet."""
    body = json.dumps({"model": "gpt", "messages": messages, "max_tokens": 6, "top_p": 0.9, **fields}).encode()
    url, key = f"{os.environ['OPENAI_BASE_URL']}/chat/completions", os.environ["OPENAI_API_KEY"]
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {key}"})
    return urllib.request.urlopen(request, timeout=60)


def ask(messages, **fields):
    """The message that answers, as it is sent back."""
    with opened(messages, **fields) as answer:
        return {"role": "assistant", "content": json.load(answer)["choices"][0]["message"]["content"]}


def write(text):
    os.write(int(os.environ["GRPO_REWARD_FD"]), text.encode())


def told_of_a_fault(answer):
    try:
        ask([{"role": "user", "content": "FAULT"}])
    except urllib.error.HTTPError as error:
        sys.exit(f"the server failed: {error.code}")


def quit_with(text):
    write(text)
    print(0.5)
    sys.exit()


ENDS = {
    "crash": lambda answer: sys.exit("no idea"),
    "unreadable": lambda answer: (write("1"), int(f"not a number: {answer}")),
    "fault": told_of_a_fault,
    "too long": lambda answer: ask([{"role": "user", "content": "long " * 400}]),
    "too often": lambda answer: [ask([{"role": "user", "content": "more"}]) for _ in range(99)],
    "killed": lambda answer: os.kill(os.getpid(), signal.SIGKILL),
    "unpaid": lambda answer: quit_with(""),
    "flooded": lambda answer: quit_with("1" * 100_000),
}
"""How a program ends once it has an answer."""


def main(what):
    problem = json.load(sys.stdin)
    messages = [{"role": "user", "content": problem["prompt"]}]
    messages += [ask(messages), {"role": "user", "content": "go on"}]
    if what in ENDS:
        ENDS[what](messages[-2]["content"])
    if what == "hang":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)
    if what == "leave":
        with opened(messages, max_tokens=60, stream=True) as answer:
            answer.read(1)
    ask(messages)
    if what == "branch":
        ask(messages, temperature=0.1)
        ask([{"role": "system", "content": "Check."}, *messages[:1]])
    write(json.dumps({"reward": len(problem["answer"]) / 4}))
    print(messages[1]["content"])
    print(99)  # as a policy could have it printed


main(sys.argv[1])
