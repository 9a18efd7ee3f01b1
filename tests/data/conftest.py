"""A Hugging Face hub of one data set, replaced at the edge: two calls of its packages."""

from types import SimpleNamespace

import pytest

from tests.data.text_files import COMMIT, pieces, write_jsonl


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub of one data set: what was asked of it, and the commit of its main branch."""
    import datasets
    import huggingface_hub

    write_jsonl(tmp_path / "hub.jsonl", pieces(60))
    fake = SimpleNamespace(asked=[], commit=COMMIT, error=None)

    def load(name, subset, **options):
        fake.asked.append((name, subset, options))
        if fake.error:
            raise fake.error
        files = str(tmp_path / "hub.jsonl")
        return datasets.IterableDataset.from_json(files)

    def dataset_info(self, name, revision):
        fake.asked.append((name, revision))
        if fake.error:
            raise fake.error
        return SimpleNamespace(sha=fake.commit)

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    return fake
