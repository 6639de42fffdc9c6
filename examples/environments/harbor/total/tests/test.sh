#!/bin/bash
# Several scores: their mean is the reward, and each is logged by its name.
right() { if [ "$(tr -d '[:space:]' < "$1" 2>/dev/null)" = "$2" ]; then echo 1; else echo 0; fi; }
echo "{\"sum\": $(right /app/sum.txt 42), \"count\": $(right /app/count.txt 3)}" > /logs/verifier/reward.json
