#!/bin/sh
# Build the image for GPUs or for CPUs: build.sh gpu|cpu TAG
set -eu
device=${1:?gpu or cpu} tag=${2:?a tag}
case $device in
  gpu) extras=gpu,objects,quantization,ray,structured,traces ;;
  cpu) extras=objects,structured,traces ;;
  *) echo "build.sh: gpu or cpu, not $device" >&2; exit 2 ;;
esac
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
exec ${DOCKER:-docker} build --build-arg DEVICE="$device" --build-arg EXTRAS="$extras" \
  --tag "$tag" --file "$root/examples/deploy/Dockerfile" "$root"
