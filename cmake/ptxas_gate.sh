# Runs a CUDA compiler. Fails if ptxas spills registers, if it warns that the matrix products (wgmma) of a warpgroup wait for
# each other, or if a process of the compiler takes too much memory.
#
#   sh ptxas_gate.sh LIMIT MEMORY compiler arguments...
#
# LIMIT: bytes that a kernel may spill, in stores and in loads. MEMORY: the most memory of a process, in KiB. The arguments must
# make ptxas verbose; its messages about kernels are not passed on, all others are. If GNU time is installed, a report is
# written to OBJECT.cost: processor seconds, memory, and the seconds that ptxas took for the slowest kernel.
limit=$1
most_memory=$2
shift 2
for argument; do
  case $argument in
    *.cu) source=$argument ;;
  esac
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
log=$(mktemp) && cost=$(mktemp) || exit
trap 'rm -f "$log" "$cost"' EXIT

[ -x /usr/bin/time ] && set -- /usr/bin/time -o "$cost" -f '%U %S %M' "$@"
"$@" 2>"$log"
status=$?
grep -v -e '^ptxas info ' -e ' bytes stack frame, ' "$log" >&2

found=$(awk -v source="$source" -v limit="$limit" '
  /^ptxas info .*Compiling entry function/ { architecture = $NF; gsub("\047", "", architecture) }
  /^ptxas info .*Function properties for/ { kernel = $NF }
  / bytes stack frame, / && ($5 > limit || $9 > limit) {
    printf "%s: error: more than %d bytes spilled: %d stored, %d loaded, for %s, by %s\n", source, limit, $5, $9, architecture, kernel
  }
  /\(C75[0-9][0-9]\)/ { printf "%s: error: %s\n", source, $0 }
' "$log"
  longest=$(sed -n 's/^ptxas info .*Compile time = \([0-9.]*\) ms.*/\1/p' "$log" | sort -g | tail -n 1)
  [ "$status" = 0 ] && awk -v source="$source" -v most="$most_memory" -v report="$object.cost" -v longest="$longest" '
    { printf "%.1f s %.0f MiB, a kernel %.1f s, %s\n", $1 + $2, $3 / 1024, longest / 1000, source > report }
    $3 > most {
      printf "%s: error: its compiler took %.0f MiB of memory, more than %.0f\n", source, $3 / 1024, most / 1024
    }
  ' "$cost")
if [ "$status" = 0 ] && [ -n "$found" ]; then
  echo "$found" | if command -v c++filt >/dev/null; then c++filt; else cat; fi >&2
  echo "MONOIDREDUCE_PTXAS_GATE=OFF builds such kernels all the same: they are slow, not wrong." >&2
  rm -f "$object" # the build system would take it for up to date
  status=1
fi
exit "$status"
