# Runs a CUDA compiler, and fails where ptxas spills registers or warns that products of a warpgroup wait for each other.
#
#   sh ptxas_gate.sh LIMIT compiler arguments...
#
# LIMIT: bytes that a kernel may spill, stores and loads each; the macro MONOIDREDUCE_MAY_SPILL is another limit, for one
# source. The arguments tell ptxas to be verbose; what it then says of kernels is not passed on, all else is.
limit=$1
shift
for argument; do
  case $argument in
    *.cu) source=$argument ;;
    -DMONOIDREDUCE_MAY_SPILL=*) limit=${argument#*=} ;;
  esac
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
log=$(mktemp) || exit
trap 'rm -f "$log"' EXIT

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
' "$log")
if [ "$status" = 0 ] && [ -n "$found" ]; then
  echo "$found" | if command -v c++filt >/dev/null; then c++filt; else cat; fi >&2
  echo "MONOIDREDUCE_PTXAS_GATE=OFF builds such kernels all the same: they are slow, not wrong." >&2
  rm -f "$object" # newer than its source, it would pass for built
  status=1
fi
exit "$status"
