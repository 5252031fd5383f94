#!/bin/sh
# Break the kernel in one place at a time; ThreadSanitizer or the harness has to find each.
#   mutants.sh KERNEL OUT
set -eu
kernel=$1 out=$2

mutant() { # file, sed expression
    rm -rf "$out" && cp -r "$kernel" "$out"
    sed -i "$2" "$out/$1"
    if cmp -s "$kernel/$1" "$out/$1"; then
        echo "the mutant of $1 is no mutant: $2" >&2
        exit 1
    fi
    rm "$out/module.c"
    # The mutant's headers, not the kernel's.
    ${CC:-cc} -I"$out" ${CFLAGS:-} -fsanitize=thread -o "$out/harness" harness.c "$out"/*.c -lm
    if TSAN_OPTIONS=halt_on_error=1 "$out/harness" 2 3 20 0.01 >"$out/found" 2>&1; then
        echo "not found: $2 in $1" >&2
        exit 1
    fi
    grep -q -e 'ThreadSanitizer: data race' -e '^harness.c:' "$out/found"
}

# One half instead of two.
mutant endpoint.h 's/(round & 1)/(round \& 0)/'
# Arriving does not release.
mutant round.c 's/arrivals, 1, memory_order_seq_cst/arrivals, 1, memory_order_relaxed/'
# Passing the gate does not acquire.
mutant round.c 's/arrivals, memory_order_acquire/arrivals, memory_order_relaxed/'
# Bytes in a ring are counted before they are there.
mutant ring.h 's/atomic_store(\(&ring->tail, \*own += n\))/atomic_store_explicit(\1, memory_order_relaxed)/'
# The status of a job is out before the job's results are.
mutant job.c 's/job->outcome, memory_order_release/job->outcome, memory_order_relaxed/'
echo "every mutant was found"
