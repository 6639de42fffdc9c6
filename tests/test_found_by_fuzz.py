"""What the fuzz of damaged files found, each by itself."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from grpo_roc_jax.data.problems import load_problems
from grpo_roc_jax.model.safetensors_io import INDEX_FILE, CheckpointError, read_directory


def test_a_parquet_file_with_text_that_is_not_utf8_is_refused_by_name(tmp_path):
    path = tmp_path / "rows.parquet"
    column = pyarrow.array([b"1 + \xec?"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"question": column, "answer": ["7"]}), path)
    with pytest.raises(ValueError, match=r"rows\.parquet"):
        load_problems(path)


def test_a_shard_whose_name_no_file_can_have_is_missing(tmp_path):
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "[" * 5000}}))
    with pytest.raises(CheckpointError, match=r"names the shard .*, which is missing"):
        read_directory(tmp_path)
