#!/usr/bin/env bash
# A fresh machine to a small Parcae that has learned some English, in under 15 minutes on 2 cores:
# environment, public-domain text, tokenizer, shard, training (stopped once in the middle and
# continued), loss curve, Hugging Face export, generated text.
#
#     bash launch/quickstart.sh [FOLDER]      everything goes to FOLDER (default runs/quickstart)
#
# Run it again and it continues: finished steps are kept. Variables, all optional:
#     QUICKSTART_STEPS=N          optimizer steps           QUICKSTART_PROCESSES=2   ranks
#     QUICKSTART_TEXT=FILE        your own text (jsonl)     QUICKSTART_VOCAB=2048    tokenizer size
#     QUICKSTART_PROMPT="..."     what to continue          EXTRA_ARGS="--set a.b=c" any option
#     PYTHON=/path/to/python      an environment of your own
set -euo pipefail

case "${1:-}" in
    -h | --help)
        sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    -*)
        echo "error: unknown option $1; usage: bash launch/quickstart.sh [FOLDER]" >&2
        exit 2
        ;;
esac
started=$SECONDS
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${1:-$root/runs/quickstart}
steps=${QUICKSTART_STEPS:-1200}
vocab=${QUICKSTART_VOCAB:-2048}
processes=${QUICKSTART_PROCESSES:-2}
prompt=${QUICKSTART_PROMPT:-The people of the United States}
for number in "$steps" "$vocab" "$processes"; do
    if [[ ! $number =~ ^[1-9][0-9]*$ ]]; then
        echo "error: $number is not a whole number above 0; check the QUICKSTART_* variables" >&2
        exit 2
    fi
done
if [[ -n "${QUICKSTART_TEXT:-}" && ! -f $QUICKSTART_TEXT ]]; then
    echo "error: QUICKSTART_TEXT=$QUICKSTART_TEXT is no file; give JSON lines with a key text" >&2
    exit 2
fi
if ! mkdir -p "$out" 2>/dev/null || [[ ! -w $out ]]; then
    echo "error: $out can't be written; name another folder: bash launch/quickstart.sh FOLDER" >&2
    exit 2
fi
out=$(cd "$out" && pwd)
text=${QUICKSTART_TEXT:-$out/text.jsonl}
tokenizer=$out/tokenizer
shard=$out/corpus_text_document
run=$out/run
exported=$out/hf

lap=$SECONDS
times=()
title() { echo && echo "== $*"; }
took() {
    times+=("$(printf '  %-12s %4d s' "$1" $((SECONDS - lap)))")
    lap=$SECONDS
}

source "$root/launch/environment.sh"
export TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore OMP_NUM_THREADS=1
export HF_HUB_DISABLE_PROGRESS_BARS=1
export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES="" # also where there are GPUs: it is that small
unset HOSTFILE NUM_NODES NODE_RANK INCLUDE EXCLUDE
took environment

title "text"
if [[ -f $text ]]; then
    echo "$text exists"
else
    "$PYTHON" "$root/launch/quickstart_text.py" "$text"
fi
took text

title "tokenizer: byte-level BPE, $vocab ids"
if [[ -f $tokenizer/tokenizer.json ]]; then
    echo "$tokenizer exists"
else
    "$PYTHON" "$root/tools/train_tokenizer.py" --input "$text" --vocab-size "$vocab" \
        --output "$tokenizer" --quiet
fi
took tokenizer

title "shard"
if [[ -f $shard.idx ]]; then
    echo "$shard.bin and .idx exist"
else
    "$PYTHON" "$root/tools/preprocess_data.py" --input "$text" --output-prefix "$out/corpus" \
        --tokenizer-model "$tokenizer" --append-eod --workers 2 --quiet
fi
took shard

free_port() {
    "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}
train() { # one command, the first time and every time; replaces the shell that calls it
    export NUM_GPUS=$processes MASTER_PORT=${MASTER_PORT:-$(free_port)}
    exec bash "$root/launch/pretrain_tiny.sh" \
        --set "data.train=$shard" --set "data.tokenizer=$tokenizer" --set "checkpoint.dir=$run" \
        --set "model.vocab_size=$vocab" --set "train.num_steps=$steps" \
        --set train.device=cpu --set log.interval=$((steps > 40 ? steps / 40 : 1))
}
last_step=step_$(printf %08d "$steps")
is_complete() { [[ "$(cat "$run/latest" 2>/dev/null)" == "$last_step" ]]; }
steps_made() { grep -c '"kind": "step"' "$run/log.jsonl" 2>/dev/null || true; }
train_first_half() { # a run that is told to stop half way: SIGTERM, as a cluster would
    local launcher code=0
    train &
    launcher=$!
    trap 'kill -TERM $launcher; wait $launcher; exit 130' INT TERM
    while kill -0 $launcher 2>/dev/null; do
        if [[ $(steps_made) -ge $((steps / 2)) ]]; then
            echo "-- half of the steps are made: stopping the run (SIGTERM)"
            kill -TERM $launcher 2>/dev/null || true
            break
        fi
        sleep 1
    done
    wait $launcher || code=$?
    trap - INT TERM
    if [[ $code -eq 75 ]]; then # which DeepSpeed's launcher reports as an error
        echo "-- it has saved and ended with exit code 75; the same command continues it"
    elif ! is_complete; then
        return $((code ? code : 1))
    fi
}

title "training: $processes processes on CPU, $steps steps"
if is_complete; then
    echo "$run/$last_step exists"
else
    if [[ ! -f $run/latest ]]; then
        train_first_half
    fi
    is_complete || (train)
fi
took training

title "loss"
"$PYTHON" "$root/tools/plot_run.py" "$run" --picture "$out/loss.png" | tee "$out/loss.txt"
"$PYTHON" "$root/tools/report.py" "$run" --output "$out/report.html"

title "export to Hugging Face"
"$PYTHON" "$root/tools/convert_to_hf.py" --checkpoint "$run" --output "$exported" \
    --dtype float32 --force
took export

title "generated text, T = 4 loops"
"$PYTHON" "$root/tools/generate.py" --model "$exported" --prompt "$prompt" --num-loops 4 \
    --max-new-tokens 120 --temperature 0.7 --top-k 50 --seed 1 | tee "$out/generated.txt"
took generation

title "summary"
cat <<EOF
A small Parcae was trained for $steps steps on $processes processes under DeepSpeed; it was stopped
once and went on from its checkpoint.

$(sed -n '/^validation loss/,/^unigram/p' "$out/loss.txt")

  text         $text
  tokenizer    $tokenizer
  shard        $shard.bin, .idx
  run          $run (checkpoints, config.yaml, log.jsonl)
  loss curve   $out/loss.png
  report       $out/report.html
  model        $exported (AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True))
  python       $PYTHON

$(printf '%s\n' "${times[@]}")
  together     $((SECONDS - started)) s

Next: "$PYTHON" tools/generate.py --model "$exported" --num-loops 8
EOF
