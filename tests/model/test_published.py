"""`config.json` is read as transformers reads it, including missing keys."""

import json

import pytest
from published_models import ONE_PER_FAMILY, make_config, need_transformers

from grpo_roc_jax.model.families import UnsupportedModelError
from grpo_roc_jax.model.published import read_config, same_model


def saved(config, folder) -> dict:
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", [*ONE_PER_FAMILY, "qwen2-sliding"])
def test_a_missing_key_means_what_it_means_to_transformers_or_is_refused(tmp_path, name):
    transformers = need_transformers()
    whole = saved(make_config(name), tmp_path)
    read = refused = 0
    for key in sorted(set(whole) - {"architectures", "model_type"}):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in whole.items() if k != key}))
        less = json.loads((tmp_path / "config.json").read_text())
        try:
            filled = saved(transformers.AutoConfig.from_pretrained(tmp_path), tmp_path)
            wanted = read_config(filled | {"architectures": whole["architectures"]})
            got = read_config(less)
        except UnsupportedModelError:
            refused += 1
        except Exception as error:  # a combination that transformers refuses too, by a class of its own
            assert "validat" in str(error) or "is no multiple" in str(error) or "is odd" in str(error), key
        else:
            read += 1
            assert same_model(got, wanted), key
    assert read > 8 and refused >= 3
