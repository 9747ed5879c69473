"""The router's tokenizer files: chat templates as transformers renders them, defaults, clear errors."""

import json

import pytest
import tokenizers
from fakes import EOS, write_tokenizer

from router.tokenizer import ChatTemplateError, Tokenizer, UnreadableFile, find_checkpoint


@pytest.fixture
def directory(tmp_path):
    return write_tokenizer(tmp_path)


def test_a_chat_renders_with_special_tokens_and_an_open_turn(directory):
    (directory / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = Tokenizer(directory)
    messages = [{"role": "user", "content": "a < b"}]
    assert tokenizer.render(messages) == "<bos>[user] a < b\n[assistant]"
    assert tokenizer.render(messages, add_generation_prompt=False) == "<bos>[user] a < b\n"


def test_a_tokenizer_that_was_saved_with_truncation_and_padding_neither_cuts_a_text_nor_fills_it(directory):
    path = str(directory / "tokenizer.json")
    saved = tokenizers.Tokenizer.from_file(path)
    saved.enable_truncation(6)
    saved.enable_padding(length=6)
    saved.save(path)
    tokenizer = Tokenizer(directory)
    assert [tokenizer.encode(text) for text in ("long enough", "short")] == [list(b"long enough"), list(b"short")]


def test_no_token_stands_for_more_bytes_than_the_longest_one_has(directory):
    assert Tokenizer(directory).max_token_bytes == len("<bos>")


def test_of_several_templates_the_default_one_is_taken(directory):
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "said"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert Tokenizer(directory).render([]) == "said"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates[:1]}))
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer(directory).render([])


def test_a_template_may_use_what_transformers_gives_it(directory):
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y')[:2] }}"
    )
    rendered = Tokenizer(directory).render([{"role": "user", "content": "<é>"}] * 2)
    assert rendered == '{"role": "user", "content": "<é>"}20'


def test_a_templates_refusal_and_its_errors_carry_its_words(directory):
    with pytest.raises(ChatTemplateError, match="no role elf"):
        Tokenizer(directory).render([{"role": "elf", "content": ""}])


def test_a_template_can_not_reach_out_of_its_sandbox(directory):
    (directory / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ChatTemplateError):
        Tokenizer(directory).render([])


def test_a_model_without_a_template_says_so(directory):
    (directory / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ChatTemplateError, match="send text or token ids"):
        Tokenizer(directory).render([{"role": "user", "content": "x"}])


def test_generation_config_names_defaults_and_config_is_the_last_resort_for_eos(directory):
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.6}))
    defaults = Tokenizer(directory).defaults
    assert (defaults.eos_token_ids, defaults.temperature, defaults.top_p) == ((1, 2), 0.6, None)
    (directory / "generation_config.json").unlink()
    (directory / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    assert Tokenizer(directory).defaults.eos_token_ids == (EOS,)
    (directory / "config.json").unlink()
    assert Tokenizer(directory).defaults.eos_token_ids == ()


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer.json", '{"version": '),
        ("tokenizer_config.json", '{"bos_token": '),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", '{"eos'),
        ("chat_template.jinja", "{% for m in"),
    ],
)
def test_a_damaged_file_is_named_with_the_remedy(tmp_path, name, content):
    write_tokenizer(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(UnreadableFile, match=rf"{name} cannot be read: .*fetch or save the model again"):
        Tokenizer(tmp_path)


def test_a_directory_without_a_tokenizer_says_which_file_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path)


def test_what_is_neither_a_directory_nor_a_hub_name_is_said_to_be_so(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for model in ("/no/such/place", "no/such-model-anywhere"):
        with pytest.raises(FileNotFoundError, match="is no directory, and no model that can be fetched"):
            find_checkpoint(model)


def test_a_model_may_be_named_from_the_users_own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert find_checkpoint("~/model") == tmp_path / "model"


@pytest.mark.model
def test_the_real_model_encodes_and_renders_as_transformers_does(model_dir):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(model_dir)
    tokenizer = Tokenizer(model_dir)
    texts = ["The capital of France is", "Order 12345 on 2024-01-02, it's fine.", "Ünïcödé 漢字 🙂 12 ½ ²", "  a\n\tb"]
    for text in texts:
        assert tokenizer.encode(text) == reference(text).input_ids
    messages = [{"role": "user", "content": "What is gravity?"}]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.render(messages) == expected
