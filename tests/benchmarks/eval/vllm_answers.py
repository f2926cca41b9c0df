"""vLLM for tests/benchmarks/eval/extraction_vllm.py: a process of the Python that has vLLM, and of no package of ours.

A line of JSON on stdin is a question, {"kind": "continuations" or "logprobs", "samples": [[prefix, suffix], ...]}; the
answer is a line on stdout, {"seconds": ..., "answers": [...]}, with token ids or log-probabilities of the suffix. The
first argument is the folder of the model, the second are options of vllm.LLM as JSON. Before continuations the cache
of prefixes is emptied: an earlier round has asked for the same.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Load the model, say so with an empty line, and answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to stdout
    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
    answers.write("\n")
    for line in sys.stdin:
        question = json.loads(line)
        samples = question["samples"]
        begin = time.perf_counter()
        if question["kind"] == "continuations":
            llm.reset_prefix_cache()
            prompts = [{"prompt_token_ids": prefix} for prefix, _ in samples]
            params = [
                SamplingParams(temperature=0, max_tokens=len(suffix), ignore_eos=True, detokenize=False)
                for _, suffix in samples
            ]
            found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
        else:
            prompts = [{"prompt_token_ids": prefix + suffix} for prefix, suffix in samples]
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found = [
                [
                    place[token].logprob
                    for place, token in zip(output.prompt_logprobs[len(prefix) :], suffix, strict=True)
                ]
                for output, (prefix, suffix) in zip(outputs, samples, strict=True)
            ]
        answers.write(json.dumps({"seconds": time.perf_counter() - begin, "answers": found}) + "\n")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
