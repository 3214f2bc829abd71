# Runs `sh $1 INDEX` on two hosts with a network between them: namespaces of this machine, gone when this ends.
# Host a has 10.77.0.1, host b 10.77.0.2. With $2, the ranks of host b are killed once that file has lines.
set -e
names=$(mktemp)
printf '127.0.0.1 localhost\n10.77.0.1 a\n10.77.0.2 b\n' >"$names"
mount --bind "$names" /etc/hosts
rm "$names"
hostname a
ip link set lo up
unshare --net --uts sleep infinity & b=$!
until [ "$(readlink /proc/$b/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
on_b() { nsenter --target $b --net --uts "$@"; }
ip link add towards_b type veth peer name towards_a
ip link set towards_a netns $b
ip addr add 10.77.0.1/24 dev towards_b
ip link set towards_b up
on_b hostname b
on_b ip link set lo up
on_b ip addr add 10.77.0.2/24 dev towards_a
on_b ip link set towards_a up
[ "$1" ] || exit 0
sh "$1" 0 2>"$1.a.log" & first=$!
on_b sh "$1" 1 2>"$1.b.log" & second=$!
if [ "$2" ]; then
    until [ -s "$2" ]; do sleep 0.05; done
    for process in /proc/[0-9]*; do
        [ "$(readlink $process/ns/net)" = "$(readlink /proc/$b/ns/net)" ] || continue
        case "$(tr '\0' ' ' <$process/cmdline)" in *torch.distributed.run* | *torchrun* | *meshwise.executor.launch.worker*) kill -9 "${process#/proc/}" ;; esac
    done
fi
wait $first || code=$?
wait $second || code=$?
exit ${code:-0}
