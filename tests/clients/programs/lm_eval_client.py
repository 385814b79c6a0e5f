"""lm-eval, on the command line: its own task, in batches of four prompts."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from exercises import BASE_URL, MODEL, main, works

TASK = """\
task: counting
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{target}"
{more}
"""
GENERATE = """generation_kwargs: {until: ["\\n"], max_gen_toks: 4, temperature: 0}
metric_list: [{metric: exact_match}]"""
CHOOSE = """doc_to_choice: [" 4", " 9"]
metric_list: [{metric: acc}]"""
QUESTIONS = [f"{n}, {n + 1}, {n + 2}," for n in range(1, 9)]


def evaluate(kind, target, more):
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.jsonl"
        lines = [{"question": q, "answer": f" {n + 4}"} for n, q in enumerate(QUESTIONS)]
        data.write_text("\n".join(map(json.dumps, lines)))
        task = TASK.format(data=data, kind=kind, target=target, more=more)
        (Path(folder) / "counting.yaml").write_text(task)
        model = f"model={MODEL},base_url={BASE_URL}/completions,num_concurrent=2,max_retries=1"
        tokenizer = f"tokenizer_backend=huggingface,tokenizer={os.environ['CLIENTS_TOKENIZER']}"
        command = [Path(sys.executable).parent / "lm_eval", "--model=local-completions"]
        command += [f"--model_args={model},{tokenizer}", "--tasks=counting", "--batch_size=4"]
        command += [f"--include_path={folder}", f"--output_path={folder}/out"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        results = list(Path(folder).glob("out/**/results_*.json"))
        if done.returncode or not results:
            raise RuntimeError(done.stderr)
        return json.loads(results[0].read_text())["results"]["counting"]


@works("generate_until, batches of 4")
def generate():
    assert "exact_match,none" in evaluate("generate_until", "{{answer}}", GENERATE)


@works("loglikelihood, batches of 4")
def loglikelihood():
    assert "acc,none" in evaluate("multiple_choice", "0", CHOOSE)


main(importlib.metadata.version("lm-eval"))
