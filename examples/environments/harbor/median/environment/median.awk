{ value[NR] = $1 }
END { print value[int((NR + 1) / 2)] }
