"""lm-eval's local-completions on the tasks of tests/clients/lm_eval: every log-likelihood against one
computed here, and the scores that follow from them.

The model's next token depends on the last one only, by a random table, so a log-likelihood is a sum
of entries of a table. With MODEL=PATH it is that model, and `mlxcel perplexity` is the reference."""
import json
import math
import os
import subprocess
import sys
import tempfile
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "support"))
home = tempfile.TemporaryDirectory()
os.environ.update(HF_HOME=home.name, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", NLTK_DATA=home.name)
MLXCEL = os.path.abspath(os.environ["MLXCEL"])
os.environ["MLXCEL"] = MLXCEL
os.chdir(os.path.join(HERE, "lm_eval"))  # the tasks name their data by relative paths

import lm_eval
import numpy
from lm_eval.tasks import TaskManager
from serving import DIM, EOS, server, vocabulary, write_model

TOLERANCE = 1e-3  # of a log-likelihood, which is a sum over tokens
TASKS = ["mlxcel_choice", "mlxcel_text", "mlxcel_answer"]


def ask(address, path, body=None):
    data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(urllib.request.Request(address + path, data)) as r:
        return json.load(r)


def random_table(path):
    """Writes the model; returns log-probabilities (token, next token)."""
    tokens, _, follow = vocabulary()
    random = numpy.random.default_rng(1)
    out = random.normal(0, 0.06, (len(tokens), DIM)).astype("<f4")
    for at in [ord("A"), *range(272, len(tokens))]:
        out[follow[at], at] += 1  # the greedy continuation still follows the scripts
    write_model(path, out=out.tobytes())
    # the embedding is a unit vector: normalised, its one entry is this
    logits = out.astype(float).T[: len(tokens)] / math.sqrt(1 / DIM + 1e-5)
    return logits - numpy.log(numpy.exp(logits).sum(axis=1, keepdims=True))


def scores_of_table(table):
    """For a list of token lists, of each token after the first its log-probability."""
    return lambda lists: [[None] + [table[a, b] for a, b in zip(ids, ids[1:])] for ids in lists]


def scores_of_program(model):
    def scores(lists):
        done = subprocess.run([MLXCEL, "perplexity", "-m", model, "--jsonl", "--logprobs", "1"], check=True,
                              input="".join(json.dumps({"ids": ids}) + "\n" for ids in lists), text=True,
                              stdout=subprocess.PIPE)
        return [json.loads(line)["logprobs"] for line in done.stdout.splitlines()]
    return scores


def evaluate(address, **args):
    args = {"model": "any", "base_url": address + "/v1/completions", "max_length": 1024, **args}
    return lm_eval.simple_evaluate(
        model="local-completions", model_args=args, tasks=TASKS, log_samples=True, bootstrap_iters=0,
        task_manager=TaskManager(include_path=".", include_defaults=False))


def likelihoods(run, task):
    """[(arguments of the request, its log-likelihood)] of a run."""
    out = []
    for sample in run["samples"][task]:
        for request, response in zip(sample["arguments"], sample["resps"]):
            first = response[0]
            out.append((request, first[0] if isinstance(first, (list, tuple)) else first))
    return out


def check(address, run, scores):
    ids = lambda text: ask(address, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    info = ask(address, "/tokenizer_info")
    begin = ids(info["bos_token"] or info["eos_token"])
    choices, texts = likelihoods(run, "mlxcel_choice"), likelihoods(run, "mlxcel_text")
    wanted = [(ids("".join(request)), len(ids(request[0]))) for request, _ in choices]
    wanted += [(begin + ids(*request), 1) for request, _ in texts]
    expected = [sum(s[first:]) for s, (_, first) in zip(scores([w for w, _ in wanted]), wanted)]
    worst = max(abs(got - e) for (_, got), e in zip(choices + texts, expected))
    of_choice = {tuple(request): e for (request, _), e in zip(choices, expected)}
    right = 0
    for sample in run["samples"]["mlxcel_choice"]:
        values = [of_choice[tuple(a)] for a in sample["arguments"]]
        right += max(range(len(values)), key=values.__getitem__) == sample["doc"]["answer"]
    share = right / len(run["samples"]["mlxcel_choice"])
    got = run["results"]["mlxcel_choice"]["acc,none"]
    print(f"{len(expected)} log-likelihoods, largest difference {worst:.2g}; acc {got} (computed here: {share})")
    assert worst <= TOLERANCE and got == share


def main():
    own = os.environ.get("MODEL")
    path = own or os.path.join(home.name, "table.gguf")
    scores = scores_of_program(own) if own else scores_of_table(random_table(path))
    with server(model=path, threads="2" if own else "1") as address:
        first = evaluate(address)
        check(address, first, scores)
        answers = first["results"]["mlxcel_answer"]["exact_match,none"]
        print("exact_match", answers, "bits per byte", first["results"]["mlxcel_text"]["bits_per_byte,none"])
        assert own or answers == 0.5  # the two questions that end with A
        # several prompts in a request, several requests at once, texts instead of ids: the same
        forms = [{"batch_size": 40}, {"num_concurrent": 6}, {"tokenized_requests": False}]
        if len(ask(address, "/tokenize", {"prompt": "x"})["tokens"]) > 1:
            forms.pop()  # a text gets a BOS that lm-eval does not count
        for more in forms:
            again = evaluate(address, **more)
            for task in TASKS:
                assert likelihoods(again, task) == likelihoods(first, task), (task, more)
            assert again["results"] == first["results"], more
            print(more, "ok")


main()
