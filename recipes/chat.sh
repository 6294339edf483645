#!/bin/sh
# A drafter for conversations, from prompts to a measured bundle.
#
#   recipes/chat.sh                                          prompts written for this project
#   PROMPTS=mine.jsonl HELD_OUT=kept.jsonl recipes/chat.sh   your own
#
# A line of either file is {"prompt": "..."}, {"messages": [...]}, or {"turns": ["...", "..."]}, which
# the target answers one by one. HELD_OUT (else examples/prompts.jsonl) is only measured on: prompts
# that ask its questions are dropped from PROMPTS.
#
# All is written under OUT; started again, it goes on where it stopped (for other flags choose
# another OUT). DATA_FLAGS, TRAIN_FLAGS, COMPILE_FLAGS and BENCH_FLAGS come after the flags below and
# win, but for those that may be repeated, as --temperature: they add to them.
set -eu
TARGET=${TARGET:-smollm2}
OUT=${OUT:-build/chat}
HELD_OUT=${HELD_OUT:-"$(dirname "$0")/../examples/prompts.jsonl"}
mkdir -p "$OUT"

if [ -z "${PROMPTS:-}" ]; then
  PROMPTS=$OUT/prompts.jsonl
  python -m forerun.training.chat_prompts --count 1700 --seed 0 -o "$PROMPTS"
fi

# Chat is sampled in production: 40% of the answers are, so that the drafter sees such text, too.
forerun synthesize "$TARGET" --prompts "$PROMPTS" --exclude "$HELD_OUT" -o "$OUT/data" \
  --temperature 0.8 --greedy-share 0.6 ${DATA_FLAGS:-}

# Heads that read the newest state alone are the cheapest to train and to draft with.
[ -e "$OUT/drafter/config.json" ] ||
  forerun train medusa "$TARGET" --data "$OUT/data" -o "$OUT/drafter" --epochs 8 ${TRAIN_FLAGS:-}

forerun compile "$TARGET" --drafter "$OUT/drafter+ngram" -o "$OUT/bundle" ${COMPILE_FLAGS:-}

forerun bench "$OUT/bundle" --prompts "$HELD_OUT" --max-new-tokens 128 --json "$OUT/bench.json" \
  ${BENCH_FLAGS:-}
