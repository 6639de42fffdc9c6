#!/bin/bash
passed=0
while read -r wanted numbers; do
  found=$(tr ' ' '\n' <<< "$numbers" | sort -n | awk -f /app/median.awk)
  [ "$found" = "$wanted" ] && passed=$((passed + 1))
done < /tests/cases.txt
awk "BEGIN { print $passed / $(wc -l < /tests/cases.txt) }" > /logs/verifier/reward.txt
