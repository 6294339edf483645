#!/bin/sh
# A drafter for function calls, from schemas to a measured bundle.
#
#   recipes/tool-calls.sh                                          functions of the package bfcl-eval
#   PROMPTS=mine.jsonl HELD_OUT=kept.jsonl recipes/tool-calls.sh   your own
#
# A line of either file is {"messages": [...], "tools": [schemas]}, where the target's chat template
# shows it the schemas, or {"messages": [...]} or {"prompt": "..."} with the schemas in the text.
# HELD_OUT is only measured on: prompts that ask its questions or name its functions are dropped.
#
# All is written under OUT; started again, it goes on where it stopped (for other flags choose
# another OUT). DATA_FLAGS, TRAIN_FLAGS, COMPILE_FLAGS and BENCH_FLAGS come after the flags below and
# win, but for those that may be repeated, as --temperature: they add to them.
set -eu
TARGET=${TARGET:-smollm2}
OUT=${OUT:-build/tool-calls}
mkdir -p "$OUT"

if [ -z "${PROMPTS:-}" ] && [ -z "${HELD_OUT:-}" ]; then
  PROMPTS=$OUT/prompts.jsonl HELD_OUT=$OUT/held-out.jsonl
  python -m forerun.training.tool_prompts --split train --rounds 2 --own 1500 --invented 6000 -o "$PROMPTS"
  python -m forerun.training.tool_prompts --split held-out -o "$HELD_OUT"
fi
: "${PROMPTS:?prompts to train on}" "${HELD_OUT:?prompts to measure on}"

# Calls are short and decoded greedily in production; a few sampled ones show the drafter mistakes.
forerun synthesize "$TARGET" --prompts "$PROMPTS" --exclude "$HELD_OUT" -o "$OUT/data" \
  --temperature 0.7 --greedy-share 0.75 --max-new-tokens 96 ${DATA_FLAGS:-}

# What a call says stands in the schemas and the question, so the drafter must look back: EAGLE-3 does.
# A tree of two nodes a level was worth as much as one of eight, at half the cost.
[ -e "$OUT/drafter/config.json" ] ||
  forerun train eagle3 "$TARGET" --data "$OUT/data" -o "$OUT/drafter" --intermediate 768 \
    --draft-vocabulary 4096 --unroll 4 --top-k 2 --batch 8192 --epochs 4 ${TRAIN_FLAGS:-}

# Beside it, prompt lookup copies what is longer than the tree is deep.
forerun compile "$TARGET" --drafter "$OUT/drafter+ngram" -o "$OUT/bundle" ${COMPILE_FLAGS:-}

forerun bench "$OUT/bundle" --prompts "$HELD_OUT" --max-new-tokens 80 --json "$OUT/bench.json" \
  ${BENCH_FLAGS:-}
