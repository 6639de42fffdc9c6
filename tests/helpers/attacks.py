"""Programs that try to get out, to do harm, to lie about their end, or merely to be awkward; and honest ones.

Every program is bounded, so that nothing is lost even where the sandbox does not hold (L0). Words between @ are filled
in by `arena.Arena`: @SECRET@ and @CANARY@ files, @PORT@ of a loopback service, @ABSTRACT@ and @SOCKET@ Unix sockets,
@NEIGHBOUR@ and @EXECUTOR@ process ids. A program that reaches its goal prints REACHED.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attack:
    """A program and what must come of it."""

    name: str
    code: str
    expect: str
    """Kinds separated by |; `blocked` takes any verdict about the program, as long as REACHED is not printed."""
    through: str = ""
    """Levels at which it is known to succeed, or to get another kind."""
    stdin: str = ""


def define(text: str) -> list[Attack]:
    """Attacks out of blocks that start with `### name : expected kinds ; levels it gets through`."""
    attacks = []
    for block in text.split("\n### ")[1:]:
        head, _, code = block.partition("\n")
        name, expect, through = _head(head)
        attacks.append(Attack(name, code.rstrip("\n") + "\n", expect, through))
    return attacks


def _head(head: str) -> tuple[str, str, str]:
    name, _, rest = head.partition(" : ")
    expect, _, through = rest.partition(" ; ")
    return name.strip(), expect.strip().replace(" ", ""), through.strip()


HONEST = define(r"""
### ok_print : ok
print(sum(range(10)))
### ok_echo : ok
21 * 2
### ok_numpy_sympy : ok
import numpy as np, sympy as sp
x = sp.symbols("x")
print(np.arange(5).sum(), sp.solve(x**2 - 3*x + 2, x))
### ok_lazy_library : ok
import xml.etree.ElementTree as tree, sqlite3, csv
print(tree.fromstring("<a b='1'/>").attrib)
### ok_output_300kb : ok
print("x" * 300_000)
### ok_word_error_in_output : ok
print("mean squared error: 0.0"); print("Traceback (most recent call last):"); print("[exception] NameError")
### ok_sys_exit_zero : ok
import sys
print("done"); sys.exit(0)
### ok_exit_none : ok
print("done"); exit()
### ok_asyncio : ok
import asyncio
async def main():
    await asyncio.sleep(0.01)
    return await asyncio.gather(*(asyncio.sleep(0.01, i) for i in range(3)))
print(asyncio.run(main()))
### ok_binary_stdout : ok
import os
os.write(1, bytes(range(256)))
### ok_control_tokens : ok
print("<|im_end|>\n<|im_start|>user\nhello</tool_response><answer>42</answer>")
### ok_stdout_none : ok
import sys
print("before"); sys.stdout = None
### ok_stdout_closed : ok
import sys
print("before"); sys.stdout.close()
### ok_stdout_replaced : ok
import io, sys
sys.stdout = io.StringIO(); print("lost")
### ok_stdout_deleted : ok
import sys
print("before"); del sys.stdout, sys.stderr
### ok_stderr_only : ok
import sys
print("warning: error", file=sys.stderr)
### ok_threads : ok
import threading
out = []
threads = [threading.Thread(target=out.append, args=(i,)) for i in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
print(sorted(out))
### ok_daemon_thread : ok
import threading
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
print("main done")
### ok_atexit : ok
import atexit
atexit.register(print, "late")
print("early")
### ok_executor_pool : ok
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool: print(list(pool.map(abs, range(-3, 0))))
### ok_own_main_guard : ok
def main(): print("main")
if __name__ == "__main__": main()
### ok_dataclass_pickle : ok
import pickle
from dataclasses import dataclass
@dataclass
class P:
    x: int
print(pickle.loads(pickle.dumps(P(3))))
### ok_signal_alarm : ok
import signal
def ring(*_): raise TimeoutError
signal.signal(signal.SIGALRM, ring)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    while True: pass
except TimeoutError: print("rang")
### ok_recursion_caught : ok
def f(): f()
try: f()
except RecursionError: print("caught")
### ok_big_thread_stack : ok
import sys, threading
sys.setrecursionlimit(20000); threading.stack_size(64 << 20)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
t = threading.Thread(target=lambda: print(depth(10000))); t.start(); t.join()
### ok_memory_error_caught : ok
try: x = bytearray(20 << 30)
except MemoryError: print("caught")
### ok_many_lines : ok
for i in range(20000): print(i)
### ok_empty : ok

### ok_comment_only : ok
# nothing to do
### ok_unicode : ok
print("π ≈ 3.14159, 日本語, \U0001f600")
### ok_crlf : ok
x = 1
if x:
    print("crlf")
### ok_deep_tree : ok ; L1
import os
for i in range(800):
    os.mkdir("d"); os.chdir("d")
print("deep")
### ok_scratch_file : ok ; L1
open("a.txt", "w").write("hello"); print(open("a.txt").read())
### ok_import_own_module : ok ; L1
open("helper.py", "w").write("value = 7"); import helper; print(helper.value)
### ok_tempfile : ok ; L1
import tempfile
with tempfile.NamedTemporaryFile("w+") as f: f.write("x"); f.seek(0); print(f.read())
### ok_chmod_scratch : ok ; L1
import os
open("a", "w").close(); os.chmod("a", 0o755); os.utime("a"); print(os.path.exists("a"))
### ok_stdin_path : ok
print(open(0).read())
### ok_heap_plant : ok
marks = ["PLANTED-" + str(i) * 3 for i in range(1000)]
print(len(marks))
""")

ERRORS = define(r"""
### exc_zero_division : exception
1 / 0
### exc_name : exception
print(undefined_name)
### exc_stop_iteration : exception
next(iter([]))
### exc_plain : exception
raise Exception("x")
### exc_keyboard_interrupt : exception
raise KeyboardInterrupt
### exc_generator_exit : exception
raise GeneratorExit
### exc_base_subclass : exception
class Odd(BaseException): pass
raise Odd
### exc_group : exception
raise ExceptionGroup("many", [ValueError(1), TypeError(2)])
### exc_sys_exit_nonzero : exception
import sys
sys.exit(3)
### exc_sys_exit_text : exception
import sys
sys.exit("bad input")
### exc_os_exit_zero : exception
import os
print("almost"); os._exit(0)
### exc_os_exit_98 : exception
import os
os._exit(98)
### exc_recursion : exception
def f(): f()
f()
### exc_huge_message : exception
raise ValueError("m" * 50_000_000)
### exc_message_raises : exception
class Bad(Exception):
    def __str__(self): raise RuntimeError("no text")
raise Bad
### exc_message_not_text : exception
class Bad(Exception):
    def __str__(self): return 5
raise Bad
### exc_repr_raises : exception
class Bad:
    def __repr__(self): raise RuntimeError("no repr")
Bad()
### exc_lying_class : exception
class Liar(Exception):
    __class__ = property(lambda self: SystemExit)
raise Liar
### exc_metaclass_name : exception
class Meta(type):
    __name__ = property(lambda cls: 1 / 0)
class Odd(Exception, metaclass=Meta): pass
raise Odd
### exc_builtins_cleared : exception
import builtins
builtins.__dict__.clear()
print("x")
### exc_builtins_poisoned : exception
import builtins
for name in ("str", "repr", "isinstance", "len", "print", "open", "type", "issubclass", "BaseException"):
    setattr(builtins, name, None)
raise ValueError("poisoned")
### exc_modules_cleared : exception
import sys
sys.modules.clear()
raise ValueError("no modules")
### exc_async_into_harness : exception|crash
import ctypes, threading
main = threading.main_thread().ident
def throw():
    while True: ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(KeyError))
threading.Thread(target=throw, daemon=True).start()
while True: pass
### exc_trace_function_breaks : exception
import sys
def trace(*_): raise ValueError("from trace")
sys.settrace(trace)
def f(): pass
f()
### exc_excepthook_exits : exception
import os, sys
sys.excepthook = lambda *_: os._exit(0)
raise ValueError("hooked")
### exc_stdin_exhausted : exception
input(); input()
### exc_ascii_stream : exception
print("\ud800")
### exc_wait_for_nobody : exception
import os
os.wait()
### exc_exec_replaced : exception|blocked
import os, sys
os.execv("/bin/true", ["true"])
### crash_stack_overflow : crash|exception
x = []
for _ in range(500_000): x = [x]
repr(x)
### crash_abort : crash
import os
os.abort()
### crash_null_pointer : crash
import ctypes
ctypes.string_at(0)
### crash_self_kill : crash
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
### crash_self_terminate : crash
import os, signal
os.kill(os.getpid(), signal.SIGTERM)
### crash_at_exit : crash|exception
import atexit, os
atexit.register(os.abort); print("fine so far")
### syn_bracket : syntax_error
print((1
### syn_indent : syntax_error
if True:
print(1)
### syn_return_outside : syntax_error
return 5
### syn_nonlocal : syntax_error
nonlocal x
### syn_deep_nesting : syntax_error
print((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((1))))))))))))
### syn_magic : syntax_error
%matplotlib inline
### syn_markdown : syntax_error
```python
print(1)
```
### time_busy : timeout
while True: pass
### time_sleep : timeout
import time
time.sleep(1000)
### time_signals_ignored : timeout
import signal
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
### time_signals_blocked : timeout
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True: pass
### time_catch_everything : timeout
while True:
    try:
        while True: pass
    except BaseException: pass
### time_big_integer : timeout|memory_limit
9**9**9
### time_regex : timeout
import re
re.match(r"(a+)+$", "a" * 64 + "b")
### time_thread_keeps_running : timeout
import threading
def spin():
    while True: pass
threading.Thread(target=spin).start()
### time_slow_drip : timeout
import time
while True: print("."); time.sleep(0.02)
### time_many_threads_spin : timeout
import threading
def spin():
    while True: pass
for _ in range(8): threading.Thread(target=spin).start()
### time_lock : timeout
import threading
lock = threading.Lock(); lock.acquire(); lock.acquire()
### time_read_pipe : timeout
import os
r, w = os.pipe()
os.read(r, 1)
### time_stop_self : timeout|blocked
import os, signal
os.kill(os.getpid(), signal.SIGSTOP)
### time_in_atexit : timeout
import atexit
def spin():
    while True: pass
atexit.register(spin)
### time_in_del : timeout
class Bad:
    def __del__(self):
        while True: pass
keep = Bad()
### time_in_repr : timeout
class Bad:
    def __repr__(self):
        while True: pass
Bad()
### time_in_str_of_error : timeout
class Bad(Exception):
    def __str__(self):
        while True: pass
raise Bad
### mem_list : memory_limit
[0] * 10**10
### mem_grow : memory_limit|timeout
x = []
while True: x.append(bytearray(1 << 20))
### mem_small_objects : memory_limit|timeout
x = []
while True: x.append((len(x), [len(x)]))
### mem_string : memory_limit
"x" * (20 << 30)
### mem_numpy : memory_limit
import numpy as np
np.ones((40000, 40000))
### mem_anonymous_map : blocked
import mmap
m = mmap.mmap(-1, 8 << 30); m[:: 1 << 20] = b"x" * (8 << 10); print("REACHED")
### mem_shared_map : blocked
import mmap
maps = [mmap.mmap(-1, 256 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) for _ in range(16)]; print("REACHED")
### mem_lock : blocked
import ctypes
b = ctypes.create_string_buffer(1 << 20)
if ctypes.CDLL(None).mlock(b, 1 << 20) == 0: print("REACHED")
### out_flood : output_limit
while True: print("x" * 1000)
### out_flood_stderr : output_limit
import sys
while True: sys.stderr.write("x" * 10000)
### out_flood_errors_caught : output_limit
import os
while True:
    try: os.write(1, b"x" * 65536)
    except OSError: pass
### out_huge_echo : output_limit|memory_limit
"x" * 30_000_000
### out_huge_one_write : output_limit|exception
print("x" * 30_000_000)
""")

HOSTILE = define(r"""
### proc_fork : blocked ; L0
import os
if os.fork() == 0: os._exit(0)
print("REACHED")
### proc_fork_bomb : blocked ; L0
import os
made = 0
for _ in range(100):
    try:
        if os.fork() == 0:
            import time
            time.sleep(3); os._exit(0)
        made += 1
    except OSError: break
if made > 2: print("REACHED")
### proc_raw_fork : blocked ; L0
import ctypes, os
pid = ctypes.CDLL(None).syscall(57)
if pid == 0: os._exit(0)
if pid > 0: print("REACHED")
### proc_vfork_clone3 : blocked ; L0
import ctypes, os, struct
libc = ctypes.CDLL(None)
args = struct.pack("8Q", 0, 0, 0, 0, 17, 0, 0, 0)
pid = libc.syscall(435, args, len(args))
if pid == 0: os._exit(0)
if pid > 0: print("REACHED")
### proc_clone_newuser : blocked ; L0
import ctypes, os
pid = ctypes.CDLL(None).syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
if pid == 0: os._exit(0)
if pid > 0: print("REACHED")
### proc_daemonise : blocked ; L0
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(20)
    os._exit(0)
print("REACHED")
### proc_orphan_holds_stdout : blocked
import os, time
try:
    if os.fork() == 0:
        time.sleep(30); os._exit(0)
except OSError: pass
print("parent done")
### proc_exec_shell : blocked ; L0
import subprocess
print(subprocess.run(["/bin/sh", "-c", "echo REACHED"], capture_output=True, text=True).stdout)
### proc_os_system : blocked ; L0
import os
os.system("echo REACHED")
### proc_posix_spawn : blocked ; L0
import os
os.waitpid(os.posix_spawn("/bin/echo", ["echo", "REACHED"], {}), 0)
### proc_multiprocessing : blocked ; L0
import multiprocessing
p = multiprocessing.get_context("fork").Process(target=print, args=("REACHED",), kwargs={"flush": True})
p.start(); p.join()
### proc_exec_memfd : blocked ; L0
import os
fd = os.memfd_create("x"); os.write(fd, open("/bin/echo", "rb").read())
os.execve(fd, ["echo", "REACHED"], {})
### proc_kill_parent : blocked ; L0
import os, signal
os.kill(os.getppid(), signal.SIGKILL)
print("REACHED")
### proc_stop_parent : blocked ; L0
import os, signal
os.kill(os.getppid(), signal.SIGSTOP if os.getppid() < 2 else 0); print("REACHED" if os.getppid() > 1 else "pid 1")
### proc_kill_neighbour : blocked ; L0
import os
os.kill(@NEIGHBOUR@, 0); print("REACHED")
### proc_kill_executor : blocked ; L0
import os
os.kill(@EXECUTOR@, 0); print("REACHED")
### proc_kill_all : blocked ; L0
import os
try: os.kill(-1, 0); print("REACHED" if os.getppid() > 1 else "only itself in here")
except OSError as e: print(e)
### proc_queue_signal : blocked ; L0
import ctypes
buf = ctypes.create_string_buffer(128)
if ctypes.CDLL(None).syscall(129, @NEIGHBOUR@, 0, buf) == 0: print("REACHED")
### proc_signal_by_owner : blocked ; L0
import fcntl, os, signal, struct
r, w = os.pipe()
for command, value in ((8, @NEIGHBOUR@), (15, struct.pack("ii", 1, @NEIGHBOUR@)), (10, signal.SIGCONT)):
    try: fcntl.fcntl(r, command, value); print("REACHED", command)
    except OSError as e: print(e)
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
os.write(w, b"x")
### proc_pidfd : blocked ; L0
import os
fd = os.pidfd_open(@NEIGHBOUR@); print("REACHED")
### proc_ptrace : blocked ; L0
import ctypes
if ctypes.CDLL(None, use_errno=True).ptrace(16, @NEIGHBOUR@, 0, 0) == 0: print("REACHED")
### proc_read_memory : blocked ; L0
import ctypes, os
class V(ctypes.Structure): _fields_ = [("b", ctypes.c_void_p), ("n", ctypes.c_size_t)]
buf = ctypes.create_string_buffer(16)
local, remote = V(ctypes.addressof(buf), 16), V(id(os), 16)
for pid in (os.getppid(), @NEIGHBOUR@):
    if ctypes.CDLL(None).process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) > 0: print("REACHED")
### proc_read_mem_file : blocked ; L0
import os
fd = os.open(f"/proc/{os.getppid()}/mem", os.O_RDONLY)
try: os.pread(fd, 1, id(os)); print("REACHED")
finally: os.close(fd)
### proc_list_host : blocked ; L0 L1
import os
if any(name == "@NEIGHBOUR@" for name in os.listdir("/proc")): print("REACHED")
### proc_read_cmdline : blocked ; L0 L1
print("REACHED", open("/proc/@NEIGHBOUR@/cmdline").read())
### proc_read_environ : blocked ; L0 L1
if "@MARK@" in open("/proc/@EXECUTOR@/environ").read() or open("/proc/@NEIGHBOUR@/environ").read(): print("REACHED")
### proc_priority : blocked
import os
try: os.nice(-5); print("REACHED")
except OSError as e: print(e)
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10)); print("REACHED")
### proc_affinity_of_parent : blocked ; L0
import os
os.sched_setaffinity(os.getppid(), {0}); print("REACHED")
### proc_limits_of_parent : blocked ; L0
import os, resource
resource.prlimit(os.getppid(), resource.RLIMIT_CORE); print("REACHED" if os.getppid() > 1 else "own")
### proc_thread_bomb : blocked ; L0 L1 L2
import threading, time
threading.stack_size(64 << 10)
n = 0
try:
    for _ in range(1500):
        threading.Thread(target=time.sleep, args=(0.5,), daemon=True).start(); n += 1
except RuntimeError: pass
print("REACHED" if n > 200 else n)
### priv_raise_limits : blocked
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
    soft, hard = resource.getrlimit(kind)
    try: resource.setrlimit(kind, (hard * 4, hard * 4)); print("REACHED", kind)
    except (ValueError, OSError): pass
### priv_mount : blocked
import ctypes
libc = ctypes.CDLL(None)
if libc.mount(b"none", b".", b"tmpfs", 0, None) == 0: print("REACHED")
if libc.umount2(b"/", 2) == 0: print("REACHED")
### priv_unshare : blocked ; L0
import ctypes
if ctypes.CDLL(None).unshare(0x10000000) == 0: print("REACHED")
### priv_setns : blocked
import ctypes, os
fd = os.open("/proc/1/ns/net", os.O_RDONLY)
if ctypes.CDLL(None).setns(fd, 0) == 0: print("REACHED")
### priv_setuid : blocked
import os
try: os.setuid(0 if os.getuid() else 1); print("REACHED")
except OSError as e: print(e)
os.setgroups([0]); print("REACHED")
### priv_chroot : blocked
import os
os.chroot("."); print("REACHED")
### priv_hostname : blocked
import socket
socket.sethostname("owned"); print("REACHED")
### priv_kernel_surface : blocked ; L0
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
denied = {errno.EPERM, errno.ENOSYS, errno.EACCES}
for number in (321, 323, 298, 425, 248, 250, 240, 246, 175, 272, 308, 101, 435, 442, 428, 135):
    if libc.syscall(number, -1, -1, -1, -1, -1) >= 0 or ctypes.get_errno() not in denied: print("REACHED", number)
### priv_x32_calls : blocked ; L0
import ctypes
if ctypes.CDLL(None).syscall(0x40000000 + 39) > 0: print("REACHED")
### priv_int80 : blocked|crash
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
pid = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
import os
if pid == os.getpid() and os.environ.get("never"): print("REACHED")
### priv_seccomp_more : blocked ; L0
import ctypes
if ctypes.CDLL(None).prctl(38, 0, 0, 0, 0) == 0: print("REACHED")
### priv_dumpable : blocked ; L0
import ctypes
if ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0: print("REACHED")
### priv_capabilities : blocked
status = None
import ctypes, struct
header, data = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
ctypes.CDLL(None).syscall(125, header, data)
if any(data.raw): print("REACHED")
### priv_keyring : blocked ; L0
import ctypes
if ctypes.CDLL(None).syscall(250, 0, -3, 1) > 0: print("REACHED")
### env_own : blocked
import os
inherited = [k for k in ("PYTHONPATH", "VIRTUAL_ENV", "LD_PRELOAD") if k in os.environ]
if inherited or "@MARK@" in str(os.environ): print("REACHED")
### file_read_secret : blocked ; L0 L1
print(open("@SECRET@").read(), "REACHED")
### file_read_by_descriptor_walk : blocked ; L0 L1
import os
fd = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
print(os.listdir(fd)); os.open("@SECRET@".lstrip("/"), os.O_RDONLY, dir_fd=fd); print("REACHED")
### file_read_dotdot : blocked ; L0 L1
import os
print(open(os.path.join(*[".."] * 12, "@SECRET@".lstrip("/"))).read(), "REACHED")
### file_symlink_escape : blocked ; L0
import os
os.symlink("@SECRET@", "link"); print(open("link").read(), "REACHED")
### file_hardlink_escape : blocked ; L0
import os
os.link("@CANARY@", "link"); open("link", "w").write("owned"); print("REACHED")
### file_passwd : blocked ; L0 L1
print(open("/etc/passwd").read(), "REACHED")
### file_stat_home : blocked ; L0 L1
import os
print(os.listdir("/root"), os.listdir("/home"), "REACHED")
### file_overwrite_canary : blocked ; L0
open("@CANARY@", "w").write("owned"); print("REACHED")
### file_append_canary : blocked ; L0
open("@CANARY@", "a").write("owned"); print("REACHED")
### file_delete_canary : blocked ; L0
import os
os.unlink("@CANARY@"); print("REACHED")
### file_rename_canary : blocked ; L0
import os
os.rename("@CANARY@", "@CANARY@.gone"); print("REACHED")
### file_lease_canary : blocked ; L0
import fcntl, os
fcntl.fcntl(os.open("@CANARY@", os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK); print("REACHED")
### file_truncate_canary : blocked ; L0
import os
os.truncate("@CANARY@", 0); print("REACHED")
### file_open_truncate_readonly : blocked ; L0
import os
os.open("@CANARY@", os.O_RDONLY | os.O_TRUNC); print("REACHED")
### file_chmod_utime : blocked ; L0
import os
os.chmod("@CANARY@", 0o777); os.utime("@CANARY@", (0, 0))
try: os.setxattr("@CANARY@", "user.x", b"1")
except OSError: pass
### file_create_outside : blocked ; L0
import os
open(os.path.dirname("@CANARY@") + "/new", "w").write("x"); print("REACHED")
### file_write_tmp : blocked ; L0
open("/tmp/grpo-attack-left", "w").write("x"); print("REACHED")
### file_write_library : blocked ; L0
import os
path = os.path.dirname(os.__file__) + "/grpo_attack_left.py"
open(path, "w").write("x = 1"); print("REACHED")
os.unlink(path)
### file_write_shm : blocked ; L0
open("/dev/shm/grpo-attack-left", "w").write("x" * 1000); print("REACHED")
### file_mknod : blocked
import os, stat
os.mknod("disk", stat.S_IFBLK | 0o600, os.makedev(254, 0)); os.open("disk", os.O_RDONLY); print("REACHED")
### file_devices : blocked
import os
for name in ("/dev/mem", "/dev/kmsg", "/dev/kvm", "/dev/fuse", "/dev/net/tun", "/dev/loop-control", "/dev/nvidia0"):
    try: os.open(name, os.O_RDWR)
    except OSError: continue
    print("REACHED" if os.getuid() else "root below L2", name)
### file_disk_device : blocked ; L0 L1
import os
os.open("/dev/vda", os.O_RDONLY); print("REACHED")
### file_inherited_descriptors : blocked
import os
found = [fd for fd in range(4, 256) if os.path.exists(f"/proc/self/fd/{fd}")]
for fd in range(4, 256):
    try: os.fstat(fd)
    except OSError: continue
    print("REACHED", fd)
### file_cgroup : blocked ; L0
open("/sys/fs/cgroup/memory/grpo-attack", "w").write("x"); print("REACHED")
### file_sysctl : blocked ; L0
open("/proc/sys/kernel/core_pattern", "r+").close(); print("REACHED")
### file_handle : blocked ; L0
import ctypes
if ctypes.CDLL(None).syscall(304, 0, 0, 0) >= 0: print("REACHED")
### file_ioctl_terminal : blocked
import fcntl, os
fd = os.open("/dev/tty", os.O_RDWR); fcntl.ioctl(fd, 0x5412, b"x"); print("REACHED")
### disk_fill : blocked
import os
total = 0
try:
    for i in range(40):
        with open(f"f{i}", "wb") as f: f.write(b"x" * (20 << 20))
        total += 20
except OSError: pass
if total > 200: print("REACHED", total)
### disk_many_files : blocked
n = 0
try:
    for i in range(60000):
        open(f"f{i}", "w").close(); n += 1
except OSError: pass
if n > 50000: print("REACHED", n)
### disk_parked_in_socket : blocked ; L0
import array, os, socket
a, b = socket.socketpair()
for fd in (a.fileno(), *range(3, 64)):
    try:
        if fd != a.fileno() and fd != b.fileno(): os.dup2(a.fileno(), fd)
        file = os.open("parked", os.O_CREAT | os.O_RDWR); os.unlink("parked"); os.write(file, b"x" * 4096)
        socket.socket(fileno=fd).sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))])
        print("REACHED", fd)
        break
    except OSError as e: print(fd, e)
### disk_sparse : blocked
with open("s", "wb") as f: f.truncate(4 << 40)
print("REACHED")
### disk_fallocate : blocked
import os
fd = os.open("s", os.O_CREAT | os.O_RDWR); os.posix_fallocate(fd, 0, 4 << 30); print("REACHED")
### disk_unlinked_file : blocked
import os, time
fds = []
total = 0
try:
    for i in range(30):
        fd = os.open(f"f{i}", os.O_CREAT | os.O_RDWR); os.unlink(f"f{i}"); fds.append(fd)
        total += os.write(fd, b"x" * (20 << 20))
        time.sleep(0.03)
except OSError: pass
if total > 400 << 20: print("REACHED", total)
### disk_unreadable_directory : blocked
import os, time
os.umask(0o400)
try: os.mkdir("d", 0o300)
except OSError: os.mkdir("d")
for i in range(20):
    with open(f"d/f{i}", "wb") as f: f.write(b"x" * (8 << 20))
    if i > 13: print("REACHED", i)
    time.sleep(0.03)
### disk_directory_made_unreadable : blocked
import os, time
os.mkdir("d")
for i in range(20):
    with open(f"d/f{i}", "wb") as f: f.write(b"x" * (8 << 20))
    os.chmod("d", 0o300)
    if i > 13: print("REACHED", i)
    time.sleep(0.03)
### disk_deleted_but_mapped : blocked
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
for i in range(20):
    fd = os.open("f", os.O_CREAT | os.O_RDWR); os.write(fd, b"x" * (8 << 20))
    if libc.mmap(None, ctypes.c_size_t(4096), 1, 1, fd, ctypes.c_long(0)) in (None, 2**64 - 1): raise OSError
    os.close(fd); os.unlink("f")
    if i > 13: print("REACHED", i)
    time.sleep(0.05)
### disk_directory_that_moves : blocked
import os, threading, time
os.makedirs("a/big"); os.mkdir("b")
def move():
    while True: os.rename("a/big", "b/big"); os.rename("b/big", "a/big")
threading.Thread(target=move, daemon=True).start()
made = 0
while made < 20:
    try: file = open("a/big/f%d" % made, "wb")
    except FileNotFoundError: continue
    file.write(b"x" * (8 << 20)); file.close(); made += 1
    if made > 13: print("REACHED", made)
    time.sleep(0.03)
### disk_reserved_space : blocked ; L0
import ctypes, os
fd = os.open("s", os.O_CREAT | os.O_RDWR)
ctypes.CDLL(None).fallocate(fd, 1, ctypes.c_long(0), ctypes.c_long(256 << 20))
if os.fstat(fd).st_blocks > 100 << 11: print("REACHED")
### disk_deleted_files_of_threads : blocked
import ctypes, os, threading, time
libc = ctypes.CDLL(None)
held = []
def hold(i):
    libc.syscall(436, 1000, 1000, 2)
    fd = os.open(f"f{i}", os.O_CREAT | os.O_RDWR); os.unlink(f"f{i}"); held.append(os.write(fd, b"x" * (8 << 20)))
    time.sleep(5)
for i in range(20):
    threading.Thread(target=hold, args=(i,), daemon=True).start(); time.sleep(0.05)
    if sum(held) > 100 << 20: print("REACHED", i)
### disk_cell_that_is_faster_than_any_look : exception
for i in range(6):
    with open(f"f{i}", "wb") as f: f.write(b"x" * (8 << 20))
### fd_tables_by_close_range : blocked ; L0
import ctypes, os, threading
libc, made, together = ctypes.CDLL(None), [], threading.Barrier(5)
def hold():
    libc.syscall(436, 1000, 1000, 2)
    try:
        while len(made) < 200: made.append(os.dup(0))
    except OSError: pass
    together.wait(5)
threads = [threading.Thread(target=hold) for _ in range(4)]
for thread in threads: thread.start()
together.wait(5)
for thread in threads: thread.join()
print("REACHED" if len(made) > 64 else len(made))
### fd_tables_by_clone : blocked ; L0
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=7)
# mov eax, 56; syscall; test eax, eax; jnz +9; xor edi, edi; mov eax, 60; syscall; ret
code.write(bytes.fromhex("b838000000 0f05 85c0 7509 31ff b83c000000 0f05 c3"))
clone = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_ulong] * 5)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
stack = mmap.mmap(-1, 1 << 16)
top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + 60000
for flags in (0x10900, 0x10B00, 0x50F00 & ~0x400):
    if 0 < clone(flags, top, 0, 0, 0) < 1 << 30: print("REACHED", hex(flags))
### fd_seals_that_keep_memory : blocked ; L0
import fcntl
for fd in (1, 2):
    try: fcntl.fcntl(fd, 1033, 2 | 1); print("REACHED")
    except OSError as e: print(e)
### mem_input_that_grows : blocked
import ctypes, os
for step in (
    lambda: os.ftruncate(0, 30 << 20),
    lambda: os.pwrite(0, b"x" * (30 << 20), 0),
    lambda: ctypes.CDLL(None).fallocate(0, 1, ctypes.c_long(0), ctypes.c_long(30 << 20)),
):
    try: step()
    except OSError as e: print(e)
if os.fstat(0).st_blocks > 2048: print("REACHED")
### mem_large_pipe : blocked ; L0
import fcntl, os
r, w = os.pipe()
if fcntl.fcntl(w, 1031, 1 << 20) >= 1 << 20: print("REACHED")
### file_notify_of_readers : blocked ; L0
import fcntl, os
fcntl.fcntl(os.open(os.path.dirname(os.__file__), os.O_RDONLY), 1026, 1); print("REACHED")
### file_write_hint : blocked ; L0
import fcntl, os, struct
fd = os.open(os.__file__, os.O_RDONLY)
for command in (1036, 1038):
    try: fcntl.fcntl(fd, command, struct.pack("Q", 2)); print("REACHED", command)
    except OSError as e: print(e)
### fd_exhaustion : exception
import os
for _ in range(5000): os.open("/dev/null", os.O_RDONLY)
### fd_close_all : exception|ok|crash
import os
os.closerange(0, 256)
### leak_file_leave : blocked ; L0
import os
for place in (".", "/tmp", "/dev/shm", "/var/tmp"):
    try: open(f"{place}/grpo-attack-mark", "w").write("x")
    except OSError: pass
### leak_file_find : blocked ; L0
import os
for place in (".", "/tmp", "/dev/shm", "/var/tmp"):
    if os.path.exists(f"{place}/grpo-attack-mark"):
        print("REACHED", place)
        try: os.unlink(f"{place}/grpo-attack-mark")
        except OSError: pass
### leak_heap_scan : blocked
import ctypes, gc
mark = "".join(map(chr, (80, 76, 65, 78, 84, 69, 68, 45)))
for o in gc.get_objects():
    if isinstance(o, (list, tuple)) and any(isinstance(x, str) and x.startswith(mark) for x in o[:3]): print("REACHED")
### leak_heap_pages : blocked ; L0 L1
import re
needle = bytes((80, 76, 65, 78, 84, 69, 68, 45, 57, 57, 57))
spans = [line.split()[0] for line in open("/proc/self/maps") if " rw-p " in line]
with open("/proc/self/mem", "rb", 0) as mem:
    for span in spans[:400]:
        a, b = (int(x, 16) for x in span.split("-"))
        try: mem.seek(a); data = mem.read(min(b - a, 8 << 20))
        except (OSError, ValueError, OverflowError): continue
        if data and data.count(needle) > 1: print("REACHED?", span)
### leak_memfd : blocked ; L0
import os
fd = os.memfd_create("x"); os.ftruncate(fd, 20 << 20); print("REACHED")
### leak_sysv_shm : blocked ; L0
import ctypes
i = ctypes.CDLL(None).shmget(0x6A7B, 4096, 0o1600)
if i >= 0: ctypes.CDLL(None).shmctl(i, 0, None); print("REACHED")
### leak_posix_queue : blocked ; L0
import ctypes
libc = ctypes.CDLL(None)
if libc.syscall(240, b"grpo-attack", 0o102, 0o600, None) >= 0: libc.syscall(241, b"grpo-attack"); print("REACHED")
### net_tcp_loopback : blocked ; L0
import socket
s = socket.create_connection(("127.0.0.1", @PORT@), timeout=1); s.send(b"owned"); print("REACHED")
### net_udp : blocked ; L0
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b"x", ("127.0.0.1", @PORT@)); print("REACHED")
### net_listen : blocked ; L0
import socket
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen(); print("REACHED")
### net_unix_abstract : blocked ; L0
import socket
s = socket.socket(socket.AF_UNIX); s.connect("\0@ABSTRACT@"); print("REACHED")
### net_unix_path : blocked ; L0
import socket
s = socket.socket(socket.AF_UNIX); s.connect("@SOCKET@"); print("REACHED")
### net_socketpair_connect : blocked ; L0
import socket
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.connect("\0@ABSTRACT@"); print("REACHED")
### net_sendto_abstract : blocked ; L0
import socket
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
try: a.sendto(b"x", "\0@ABSTRACT@-dgram"); print("REACHED" if __import__("os").getppid() < 0 else "sent")
except OSError as e: print(e)
### net_netlink : blocked ; L0
import socket
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); print("REACHED")
### net_raw : blocked ; L0
import socket
socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print("REACHED")
### net_packet : blocked
import socket
socket.socket(socket.AF_PACKET, socket.SOCK_RAW).bind(("lo", 0)); print("REACHED")
### net_vsock_alg : blocked ; L0
import socket
socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET); print("REACHED")
### net_urllib : blocked ; L0
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:@PORT@/", timeout=1).status, "REACHED")
### net_io_uring : blocked ; L0
import ctypes
buf = ctypes.create_string_buffer(120)
if ctypes.CDLL(None).syscall(425, 1, buf) >= 0: print("REACHED")
### out_forge_by_descriptor : exception
import os
for fd in range(3, 64):
    try: os.write(fd, b'{"kind":"ok","error_type":"","error_message":"","traceback":"","echo":"forged"}' * 3)
    except OSError: pass
raise ValueError("real")
### out_result_flood : output_limit|exception
import os
while True: os.write(3, b"x" * 65536)
### out_result_truncated : exception
import os
os.ftruncate(3, 0); raise ValueError("real")
### out_forge_then_crash : crash
import os
data = os.pread(3, 32, 0); text = b'{"kind":"ok","error_type":"","error_message":"","traceback":"","echo":"forged"}'
os.pwrite(3, data + b"%08d" % len(text) + text, 32); os.abort()
### out_forge_infra : exception
import os
data = os.pread(3, 32, 0)
text = b'{"kind":"sandbox_error","error_type":"","error_message":"","traceback":"","echo":""}'
os.pwrite(3, data + b"%08d" % len(text) + text, 32); os._exit(0)
### out_forge_infra_exit_98 : exception
import os
os._exit(98)
### out_seek_stdout : ok
import os
os.write(1, b"abc"); os.lseek(1, 4 << 20, 0); os.write(1, b"z")
### out_truncate_stdout : ok|exception
import os
print("abc", flush=True); os.ftruncate(1, 0); print("d")
""")

FORGING = define(r"""
### out_forge_at_exit : ok|exception
import atexit, gc
def forge():
    for thing in gc.get_objects():
        if type(thing).__name__ == "ProgramReport": thing.kind, thing.error_type = "ok", ""
atexit.register(forge)
1 / 0
### out_forge_success : ok|exception
import os
data = os.pread(3, 32, 0); text = b'{"kind":"ok","error_type":"","error_message":"","traceback":"","echo":"forged"}'
os.pwrite(3, data + b"%08d" % len(text) + text, 32); os._exit(0)
""")
"""A program shares its process with what reports on it, so it can hide an error of its own, at every level, as it could
by catching it; nothing else."""

SPECIAL = [
    Attack("syn_nul_byte", "print(1)\0", "syntax_error"),
    Attack("syn_surrogate", "print('\ud800')", "syntax_error|exception"),
    Attack("syn_deep_parens", "(" * 5000 + ")" * 5000, "syntax_error"),
    Attack("syn_deep_unary", "-" * 100_000 + "1", "syntax_error|crash|exception"),
    Attack("syn_deep_attribute", "x" + ".a" * 50_000, "syntax_error|exception|crash"),
    Attack("ok_long_source", "x = [\n" + "1,\n" * 600 + "##\n" * 59_400 + "]\nprint(len(x))", "ok"),
    Attack("ok_crlf_source", "x = 1\r\nprint(x)\r\n", "ok"),
    Attack("ok_byte_order_mark", "\ufeffprint(1)", "ok"),
    Attack("ok_large_stdin", "import sys; print(len(sys.stdin.read()))", "ok", stdin="y" * 2_000_000),
    Attack("ok_stdin_ignored", "print('no reading')", "ok", stdin="z" * 500_000),
]

ATTACKS = [*HONEST, *ERRORS, *HOSTILE, *SPECIAL, *FORGING]
