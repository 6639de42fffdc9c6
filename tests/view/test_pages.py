"""The file that the page is: what it may do, and that no text of a run can end the element that holds it."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

from grpo_roc_jax.view.pages import page, part, policy

EVIL = "</script><script>alert(1)</script><!--<script>{{script}}{{data}}{{style}}\u2028 é \ud800"


class Reader(HTMLParser):
    """Elements with their attributes, and the text of scripts and styles."""

    def __init__(self):
        super().__init__()
        self.elements, self.texts = [], {"script": [], "style": []}

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_data(self, data):
        if self.cdata_elem in self.texts:
            self.texts[self.cdata_elem][-1] += data


def read(text):
    reader = Reader()
    reader.feed(text)
    return reader


def test_text_of_a_run_cannot_end_its_element():
    parsed = read(page({"name": EVIL, "value": float("nan")}))
    assert [dict(attributes) for tag, attributes in parsed.elements if tag == "script"] == [
        {"type": "application/json", "id": "data"},
        {},
    ]
    assert json.loads(parsed.texts["script"][0]) == {"name": EVIL, "value": None}
    assert parsed.texts["script"][1] == part("viewer.js") and parsed.texts["style"] == [part("viewer.css")]


def test_the_policy_allows_the_script_and_the_style_of_the_page_alone():
    for data in (None, {}):
        parsed = read(page(data))
        rule = next(a["content"] for _, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy")
        hashes = re.findall("'sha256-([^']+)'", rule)
        texts = [parsed.texts["script"][1], parsed.texts["style"][0]]
        assert hashes == [base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in texts]
        assert rule.startswith("default-src 'none'; ") and "unsafe" not in rule and "http" not in rule
        assert ("connect-src 'self'" in rule) == (data is None)
        assert not [
            a for _, a in parsed.elements if {"src", "href", "style"} & a.keys() or any(n[:2] == "on" for n in a)
        ]
    assert "frame-ancestors 'none'" in policy(served=True)


def test_the_script_sets_no_markup():
    script = part("viewer.js")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", script)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", script + part("viewer.css") + part("page.html"))
