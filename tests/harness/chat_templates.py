"""Chat templates in the shapes of public model families: none is a copy, each has what is typical
of its family in how it reads messages, calls and tools."""

from __future__ import annotations

CHATML = """
{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content }}
{%- else %}{{ '<|im_start|>system\nYou help.' }}{%- endif %}
{%- if tools %}{{ '\n# Tools' }}{%- for tool in tools %}{{ '\n' ~ (tool | tojson) }}{%- endfor %}
{%- endif %}{{ '<|im_end|>\n' }}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first)
 or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{ '\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}{%- set call = call.function or call %}
{{- '\n<tool_call>{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>' + message.content + '</tool_response><|im_end|>\n' }}
{%- endif %}{%- endfor %}"""

REASONING = """
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages[::-1] %}{%- if message.role == 'user' and message.content is string
 and not message.content.startswith('<tool') %}{%- set ns.last = loop.index0 %}{%- break %}
{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.content is string %}{%- set content = message.content %}
{%- else %}{%- set content = '' %}{%- endif %}
{%- if message.role == 'assistant' %}
{%- set thought = '' %}
{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{{- '<a>' }}{%- if thought %}{{ '<think>' ~ thought ~ '</think>' }}{%- endif %}{{ content }}
{%- if message.tool_calls %}{%- for call in message.tool_calls %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '<call>' ~ call.name }}
{%- if call.arguments is string %}{{ call.arguments }}{%- else %}{{ call.arguments | tojson }}
{%- endif %}{%- endfor %}{%- endif %}
{%- else %}{{ '<' + message.role + '>' + content }}{%- endif %}{%- endfor %}"""

HEADERS = """
{{- bos_token }}{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + strftime_now('%d %b %Y') }}
{{- system_message + '<|eot_id|>' }}
{%- if tools is not none %}{%- for t in tools %}{{ t | tojson(indent=4) }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}{{ raise_exception('one call at a time') }}
{%- endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{ tool_call.arguments | tojson }}
{{- '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
{%- if message.content is mapping
 or message.content is iterable and message.content is not string %}
{{- message.content | tojson }}{%- else %}{{ message.content }}{%- endif %}{{ '<|eot_id|>' }}
{%- endif %}{%- endfor %}"""

INSTRUCT = """
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}{%- for message in loop_messages %}
{%- if message['role'] == 'user' %}
{%- if tools is not none and message == users[-1] %}{{ '[AVAILABLE_TOOLS] [' }}
{%- for tool in tools %}{%- set tool = tool.function %}{{ '{"function": {' }}
{%- for key, val in tool.items() if key != 'return' %}{%- if val is string %}
{{- '"' + key + '": "' + val + '"' }}{%- else %}{{ '"' + key + '": ' + val | tojson }}{%- endif %}
{%- if not loop.last %}{{ ', ' }}{%- endif %}{%- endfor %}{{ '}}' }}
{%- endfor %}{{ ']' }}{%- endif %}
{%- if loop.last and system_message is defined %}
{{- '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}
{%- else %}{{ '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{ '[TOOL_CALLS] [' }}
{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function | tojson %}
{{- out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id | length != 9 %}
{{- raise_exception('ids of calls have nine letters and digits') }}{%- endif %}
{{- ', "id": "' + tool_call.id + '"}' }}{%- endfor %}{{ ']' + eos_token }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}
{%- elif message['role'] == 'tool' %}
{%- if message.content is defined and message.content.content is defined %}
{%- set content = message.content.content %}{%- else %}{%- set content = message.content %}
{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + content | string + ', "call_id": "' }}
{%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}
{{- raise_exception('ids of calls have nine letters and digits') }}{%- endif %}
{{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif message['role'] != 'system' %}{{ raise_exception('unknown role ' + message['role']) }}
{%- else %}{{ '[SYSTEM] ' + message.content }}{%- endif %}{%- endfor %}"""

TYPED_TOOLS = """
{%- macro typed(spec) %}{%- if spec.type == 'array' %}{{ 'list[' ~ typed(spec['items']) ~ ']' }}
{%- else %}{{ spec.type }}{%- endif %}{%- endmacro %}
{{- '<|im_start|>system\n' }}{%- for tool in tools or [] %}{%- set f = tool.function %}
{{- 'def ' + f.name + '(' }}{%- for name, spec in f.parameters.properties.items() %}
{{- name ~ ': ' ~ typed(spec) }}{%- if not loop.last %}{{ ', ' }}{%- endif %}
{%- endfor %}{{ ')\n' }}
{%- if f.description is defined %}{{ f.description + '\n' }}{%- endif %}{%- endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m['role'] }}
{%- if m.role == 'assistant' and m.tool_calls is defined %}{%- for c in m.tool_calls %}
{{- '<tool_call>' + c.function.name }}
{%- for name, value in c.function.arguments.items() %}{{ name ~ '=' ~ value }}{%- endfor %}
{%- endfor %}{%- endif %}{{ m['content'] + '<|im_end|>' }}{%- endfor %}"""

FLAGS = """
{%- set ns = namespace(is_tool=false, is_output_first=true, system_prompt='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- set ns.system_prompt = ns.system_prompt + message['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false %}{{ '<U>' + message['content'] }}
{%- endif %}
{%- if message['role'] == 'assistant' and 'tool_calls' in message
 and message['tool_calls'] is not none %}{%- set ns.is_tool = false %}
{%- for tool in message['tool_calls'] %}
{%- if message['content'] is none %}{{ '<A>' }}{%- else %}{{ '<A>' + message['content'] }}
{%- endif %}
{{- '<call>' + tool['type'] + '<sep>' + tool['function']['name'] + '\n' }}
{{- tool['function']['arguments'] | tojson }}{%- endfor %}{{ '<end>' }}{%- endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is not defined %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<A>' + content + '<end>' }}{%- endif %}
{%- if message['role'] == 'tool' %}{{ '<output>' + message['content'] + '</output>' }}{%- endif %}
{%- endfor %}"""

PLAIN = """
{%- for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}
{%- if message.tool_calls %}{%- for call in message.tool_calls %}{{ call | tojson }}{%- endfor %}
{%- endif %}{%- endfor %}{%- if tools %}{{ tools | tojson }}{%- endif %}"""

TURNS = """
{{- bos_token }}{%- if messages[0]['role'] == 'system' %}
{%- if messages[0]['content'] is string %}{%- set first = messages[0]['content'] + '\n\n' %}
{%- else %}{%- set first = messages[0]['content'][0]['text'] + '\n\n' %}{%- endif %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set first = '' %}
{%- set loop_messages = messages %}{%- endif %}
{%- for message in loop_messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}
{%- if message['content'] is string %}{{ message['content'] | trim }}
{%- elif message['content'] is iterable %}{%- for item in message['content'] %}
{%- if item['type'] == 'text' %}{{ item['text'] | trim }}{%- endif %}{%- endfor %}
{%- else %}{{ raise_exception('content of an unknown type') }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{ '[' + call.function.name + ']' }}
{{- call.function.arguments | tojson }}{%- endfor %}{{ '<end_of_turn>\n' }}{%- endfor %}"""

CHANNELS = """
{%- if messages[0].role == 'developer' or messages[0].role == 'system' %}
{%- set developer = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set developer = '' %}{%- set loop_messages = messages %}{%- endif %}
{{- '<|start|>developer<|message|># Instructions\n' + developer }}
{%- if tools %}{%- for tool in tools %}{%- set tool = tool.function %}
{{- 'type ' + tool.name + ' = (_: {' }}
{%- for name, spec in tool.parameters.properties.items() %}{{ name + ': ' + spec.type + ',' }}
{%- endfor %}{{ '}) => any;' }}{%- endfor %}{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in loop_messages %}
{%- if message.role == 'assistant' %}
{%- if 'tool_calls' in message %}
{%- if message.content and message.thinking %}{{ raise_exception('both') }}
{%- elif message.content %}{{ '<|channel|>analysis<|message|>' + message.content }}
{%- elif message.thinking %}{{ '<|channel|>analysis<|message|>' + message.thinking }}{%- endif %}
{%- set call = message.tool_calls[0] %}{%- if call.function %}{%- set call = call.function %}
{%- endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|message|>' + (call.arguments | tojson) }}
{%- set last.name = call.name %}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}{%- endif %}
{%- elif message.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('a result without a call') }}{%- endif %}
{{- '<|start|>functions.' + last.name + '<|message|>' + message.content | tojson }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content }}{%- endif %}
{%- endfor %}"""

PARTS_ONLY = """
{%- for message in messages %}{{ '<|' + message.role + '|>' }}
{%- for part in message.content %}{%- if part.type == 'image' %}{{ '<image>' }}
{%- elif part.type == 'text' %}{{ part.text }}{%- endif %}{%- endfor %}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{%- endfor %}
{%- endfor %}{%- if tools %}{{ tools | tojson }}{%- endif %}"""

CALLS_OR_TEXT = """
{%- set ns = namespace(is_first=false) %}
{%- for message in messages %}
{%- if message['role'] == 'system' or message['role'] == 'user' %}
{{- '<U>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- for tool in message['tool_calls'] %}
{{- '<call>' + tool['type'] + '<sep>' + tool['function']['name'] + '\n' }}
{{- '```json\n' + tool['function']['arguments'] + '\n```' }}{%- endfor %}{{ '<end>' }}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{{- '<A>' + message['content'] + '<end>' }}{%- endif %}
{%- if message['role'] == 'tool' %}{{ '<output>' + message['content'] + '</output>' }}{%- endif %}
{%- endfor %}{%- if tools %}{{ tools | tojson }}{%- endif %}"""

MACROS = """
{%- macro visible(content) %}{%- if content is string %}{{ content }}
{%- elif content is iterable and content is not mapping %}{%- for item in content %}
{%- if item is mapping and item.type == 'text' %}{{ item.text }}
{%- elif item is string %}{{ item }}{%- endif %}{%- endfor %}
{%- else %}{{ content }}{%- endif %}{%- endmacro %}
{%- for tool in tools or [] %}{{ tool | tojson(ensure_ascii=False) }}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|user|>\n' + visible(m.content) }}
{%- elif m.role == 'assistant' %}{%- set content = visible(m.content) %}
{{- '<|assistant|>\n<think>' ~ (m.reasoning_content or '') ~ '</think>' }}
{%- if content.strip() %}{{ '\n' + content.strip() }}{%- endif %}
{%- for tc in m.tool_calls or [] %}{%- set tc = tc.function or tc %}
{{- '\n<tool_call>' + tc.name }}{%- set _args = tc.arguments %}{%- for k, v in _args.items() %}
{{- '<arg_key>' ~ k ~ '</arg_key><arg_value>' }}
{{- v | tojson(ensure_ascii=False) if v is not string else v }}{{ '</arg_value>' }}
{%- endfor %}{{ '</tool_call>' }}{%- endfor %}
{%- elif m.role == 'tool' %}{{ '<|observation|>' }}
{%- if m.content is string %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- else %}{%- for tr in m.content %}
{{- '<tool_response>' ~ (tr.output if tr.output is defined else tr) ~ '</tool_response>' }}
{%- endfor %}{%- endif %}
{%- elif m.role == 'system' %}{{ '<|system|>\n' + visible(m.content) }}{%- endif %}
{%- endfor %}"""

SECTIONS = """
{%- macro content_of(msg) %}{%- set c = msg.get('content') %}{%- if c is string %}{{ c }}
{%- elif c is not none %}{%- for part in c %}{%- if part['type'] == 'image' or 'image' in part %}
{{- '<|media|>' }}{%- else %}{{ part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{%- endmacro %}
{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' ~ tools | tojson }}{%- endif %}
{%- for message in messages %}
{{- '<|im_' ~ message['role'] ~ '|>' ~ (message.get('name') or message['role']) ~ '<|im_middle|>' }}
{%- if message['role'] == 'assistant' and message.get('tool_calls') %}
{{- content_of(message) }}{{ '<|tool_calls_section_begin|>' }}
{%- for call in message['tool_calls'] %}
{{- '<|tool_call_begin|>' ~ call['id'] ~ '<|tool_call_argument_begin|>' }}
{%- if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}
{%- else %}{{ call['function']['arguments'] | tojson }}{%- endif %}{{ '<|tool_call_end|>' }}
{%- endfor %}{{ '<|tool_calls_section_end|>' }}
{%- elif message['role'] == 'tool' %}
{{- '## Return of ' ~ message.tool_call_id ~ '\n' ~ content_of(message) }}
{%- elif message['content'] is not none %}{{ content_of(message) }}{%- endif %}
{{- '<|im_end|>' }}{%- endfor %}"""

TEMPLATES = {
    "chatml": CHATML, "reasoning": REASONING, "headers": HEADERS, "instruct": INSTRUCT,
    "typed tools": TYPED_TOOLS, "flags": FLAGS, "plain": PLAIN, "turns": TURNS,
    "channels": CHANNELS, "parts only": PARTS_ONLY, "calls or text": CALLS_OR_TEXT,
    "macros": MACROS, "sections": SECTIONS,
}  # fmt: skip
"""In the manner of Qwen 2.5, Qwen 3, Llama 3, Mistral, Hermes, DeepSeek V3.1, Phi, Gemma 3,
gpt-oss, models of images, DeepSeek R1, GLM 4.5, and Kimi K2."""
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
